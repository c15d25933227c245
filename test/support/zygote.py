"""A process that has imported SGLang once, and is forked wherever a test would start Python anew.

Importing SGLang takes more than ten seconds of CPU time, and a test starts many processes that do: job scripts,
trainer ranks under torchrun, servers, schedulers, detokenizers. Inside `with forks():` each
`subprocess.Popen([sys.executable, ...])` and each multiprocessing child that would be spawned, of this process and of
all that come of it, is a fork of a process with those imports instead. All else about them is as it would be: they
are children of who starts them, with the environment, directory, descriptors and session that were asked for; they
run the same module, or the same pickled function, from its beginning; and SGLang's plugins are loaded in each.

There is a zygote for each kind of imports (KINDS), made when it is first needed: of the pinned SGLang or of the newest,
as PYTHONPATH says, or what the variable SGLANG_RESHARD_ZYGOTE names. "none" is an ordinary start.

How a fork becomes the child of another process: each process that is forked this way first forks a helper, which has
one thread and no history. Asked for a child, the helper forks twice, and the process in the middle exits at once;
the orphan goes to the nearest subreaper above it, which the asking process is for that moment. Linux only.

Where a variable that is read at import differs from the zygote's, and where no helper can be reached, the start is an
ordinary one.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from sglang_reshard.testing.cpu_host import verl_settings
from support import sglangs

_TEST = Path(__file__).parent.parent
_START_S = 300.0  # for the imports, on a machine that has much else to do
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_LENGTH = struct.Struct("!I")
_PID = struct.Struct("!i")
_MOST_DESCRIPTORS = 64
LOW_NUMBERS = 400
_COMMAND_LINE = 1 << 15  # bytes that a fork has for its own
# Read at import, of what the tests set. Whoever wants another value than the zygote has is started the ordinary way.
_READ_AT_IMPORT = ("TRITON_INTERPRET",)
_libc = ctypes.CDLL(None, use_errno=True)


# -- who asks


Environment = Mapping[str, str]
VARIABLE = "SGLANG_RESHARD_ZYGOTE"
ORDINARY = {VARIABLE: "none"}  # environment of a process that is started the ordinary way, as is all that it starts


class Forker:
    """The asking end of a helper's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def start(
        self, argv: Sequence[str], environment: Environment, descriptors: Mapping[int, int], **options: Any
    ) -> int:
        """Start `argv`; the process id of the child. Raises OSError where the helper has ended.

        descriptors  of the child -> this process's that each is
        """
        order = {"argv": list(argv), "environment": dict(environment), "descriptors": list(descriptors)}
        order |= {"parent": os.getpid(), "directory": os.getcwd()} | options
        data = json.dumps(order).encode()
        with self._lock, as_subreaper():
            socket.send_fds(self._connection, [_LENGTH.pack(len(data))], list(descriptors.values()))
            self._connection.sendall(data)
            answer = _read(self._connection, _PID.size)
        return _PID.unpack(answer)[0]

    def close(self) -> None:
        self._connection.close()


_choose: Callable[[Environment], Forker | None] | None = None


@contextlib.contextmanager
def as_subreaper() -> Iterator[None]:
    """This process adopts its descendants that lose their parents."""
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _prctl(option: int, value: Any) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _fork(argv: Sequence[Any], environment: Environment, descriptors: Mapping[int, int], **options: Any) -> int:
    """The process id of a fork that does what this start would; 0 where the start has to be an ordinary one."""
    command = [os.fsdecode(a) for a in argv]
    arguments = list(itertools.dropwhile(_FLAGS.__contains__, command[1:]))
    if _choose is None or command[0] != sys.executable or not arguments:
        return 0
    if arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        return 0
    if "resource_tracker" in arguments[-1]:  # it imports nothing, and outlives who starts it
        return 0
    if any(environment.get(name) != _IMPORTED_WITH.get(name) for name in _READ_AT_IMPORT):
        return 0
    forker = _choose(environment)
    if forker is None:
        return 0
    try:
        return forker.start(arguments, environment, descriptors, **options)
    except (OSError, EOFError):  # the helper was killed
        return 0


_FLAGS = ("-B", "-u")  # of Python, which a fork has from its zygote
_IMPORTED_WITH = dict(os.environ)
_stock_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_stock_spawn = multiprocessing.util.spawnv_passfds


def _execute_child(
    self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any,
    startupinfo: Any, creationflags: Any, shell: bool, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
    errread: int, errwrite: int, *rest: Any,
) -> None:  # fmt: skip
    """In place of subprocess.Popen's own."""
    environment = os.environ if env is None else env
    plain = executable is None and preexec_fn is None and not shell and close_fds and not isinstance(args, str)
    if plain:
        files = {0: p2cread, 1: c2pwrite, 2: errwrite}
        files = {number: number if ours == -1 else ours for number, ours in files.items()}
        options: dict[str, Any] = {"session": bool(rest[-2])}
        if cwd is not None:
            options["directory"] = os.fspath(cwd)
        self.pid = _fork(args, environment, files | {fd: fd for fd in pass_fds}, **options)
        if self.pid:
            self._child_created = True
            _close_the_childs_ends(self, (p2cread, p2cwrite), (c2pwrite, c2pread), (errwrite, errread))
            return
    _stock_execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
    )  # fmt: skip


def _close_the_childs_ends(process: Any, *pipes: tuple[int, int]) -> None:
    """As subprocess.Popen's own does."""
    devnull = getattr(process, "_devnull", None)
    for theirs, ours in pipes:
        if theirs != -1 and ours != -1 and theirs != devnull:
            os.close(theirs)
    if devnull is not None:
        os.close(devnull)
    process._closed_child_pipe_fds = True


def _spawn(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """In place of multiprocessing.util.spawnv_passfds."""
    return _fork(args, os.environ, {fd: fd for fd in (0, 1, 2, *passfds)}) or _stock_spawn(path, args, passfds)


def _ask_from_now_on(choose: Callable[[Environment], Forker | None] | None) -> None:
    global _choose
    _choose = choose
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _spawn


def _forget() -> None:
    """In a child that somebody forked: the helper's socket is its parent's."""
    global _choose
    _choose = None


os.register_at_fork(after_in_child=_forget)


# -- the helper


@dataclass
class _Order:
    argv: list[str]
    environment: dict[str, str]
    descriptors: list[int]
    parent: int
    directory: str
    session: bool = False
    received: list[int] = field(default_factory=list)


def _serve(connection: socket.socket) -> _Order | None:
    """Fork for whoever asks, until nobody is there to ask. Returns the order in each fork, and None at the end."""
    while True:
        try:
            order = _next(connection)
        except (EOFError, OSError):
            return None
        reader, writer = os.pipe()
        middle = os.fork()
        if not middle:
            child = os.fork()
            if child:
                os.write(writer, _PID.pack(child))
                os._exit(0)
            connection.detach()  # closed with all else, and its number is another's then
            _await_parent(order.parent)
            _become(order)
            return order
        os.waitpid(middle, 0)  # the child has its new parent now, who has to be told only then
        connection.sendall(os.read(reader, _PID.size))
        for descriptor in (reader, writer, *order.received):
            os.close(descriptor)


def _next(connection: socket.socket) -> _Order:
    head, received, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_DESCRIPTORS)
    if not head:
        raise EOFError
    (length,) = _LENGTH.unpack(head + _read(connection, _LENGTH.size - len(head)))
    return _Order(**json.loads(_read(connection, length)), received=list(received))


def _await_parent(parent: int) -> None:
    end = time.monotonic() + 10
    while os.getppid() != parent:
        if time.monotonic() > end:
            os._exit(70)
        time.sleep(0.0005)


# -- the fork

# Objects that imports have made have them, event loops for example, and close them by number.
_opened_by_imports: set[int] = set()


def _become(order: _Order) -> None:
    """Everything that a process has from its start, as it was ordered."""
    if order.session:
        os.setsid()
    _take(order)
    os.chdir(order.directory)
    multiprocessing.process.ORIGINAL_DIR = order.directory  # type: ignore[attr-defined]
    before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(order.environment)
    _set_path(before, order.environment.get("PYTHONPATH", ""))
    tempfile.tempdir = None
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    helper = _helper()
    if (torch := sys.modules.get("torch")) is not None:  # after the helper, which has no threads
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
        # torch makes its pool of threads anew at the first use in a child, which no two threads may do at a time.
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    _show([sys.executable, *order.argv])
    _ask_from_now_on(lambda environment: None if environment.get(VARIABLE) == "none" else helper)


def _take(order: _Order) -> None:
    """The descriptors that were given, under their numbers, and of others only those that imports have opened."""
    keep = {*order.descriptors, *_opened_by_imports}
    high = [_dup_above(fd, max(keep) + 1) for fd in order.received]
    for number, fd in zip(order.descriptors, high, strict=True):
        os.dup2(fd, number)
    for fd in _descriptors() - keep:
        with contextlib.suppress(OSError):
            os.close(fd)


def _descriptors() -> set[int]:
    return set(map(int, os.listdir("/proc/self/fd")))


def _dup_above(fd: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD, least)


def _show(command: list[str]) -> None:
    """Make this the command line that /proc has of this process."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    data = b"".join(os.fsencode(argument) + b"\0" for argument in command)[: end - start - 1]
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def _set_path(before: str, after: str) -> None:
    gone = set(filter(None, before.split(os.pathsep)))
    sys.path[:] = [*filter(None, after.split(os.pathsep)), *(p for p in sys.path if p not in gone)]
    importlib.invalidate_caches()


def _helper() -> Forker:
    """A process that forks for this one, made while this one has a single thread."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if not os.fork():
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        ours.close()
        order = _serve(theirs)
        if order is None:
            os._exit(0)
        theirs.close()
        raise _Forked(order)
    theirs.close()
    return Forker(ours)


class _Forked(BaseException):
    """Takes a fork of a helper down the stack, to where processes begin."""

    def __init__(self, order: _Order) -> None:
        super().__init__()
        self.order = order


def _run(arguments: list[str]) -> NoReturn:
    """What `python ARGUMENTS` does, but for taking all modules apart at the end."""
    try:
        _execute(arguments)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if not isinstance(exit_.code, int | None):
            print(exit_.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _execute(arguments: list[str]) -> None:
    main = types.ModuleType("__main__")
    main.__spec__ = None
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    what, *rest = arguments
    if what == "-m":
        sys.argv[:] = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif what == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path(what).parent))
        main.__file__ = what
        exec(compile(Path(what).read_bytes(), what, "exec"), vars(main))


# -- the zygotes of a test session


@dataclass(frozen=True)
class Kind:
    """What is imported, and with what in the environment."""

    modules: tuple[str, ...]
    variables: Callable[[], Environment] = dict


def _for_verl() -> dict[str, str]:
    return {
        **{name: value for name, value in verl_settings.environment(1).items() if name != "PYTHONPATH"},
        "VERL_LOGGING_LEVEL": "WARN",  # verl's loggers get it when they are imported
        # Ray reads these once in a process, at import. Each driver here is the first of its Ray; and it is when this
        # process ends, and not the raylet, that a worker is alone.
        "RAY_JOB_ID": "01000000",
        "RAY_RAYLET_PID": str(os.getpid()),
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's, which would be a second thread
    }


_ENGINE = (
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.qwen3.modeling_qwen3",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.models.registry",
    "sglang.srt.plugins",
)
KINDS = {
    "cpu": Kind(_ENGINE),
    "newest": Kind(_ENGINE),
    "verl": Kind(
        (
            *_ENGINE,
            "ray",
            "verl.checkpoint_engine",
            "verl.trainer.main_ppo",
            "verl.trainer.ppo.v1",
            "verl.workers.engine_workers",
            "verl.workers.rollout.sglang_rollout.async_sglang_server",
            "verl.workers.rollout.sglang_rollout.sglang_rollout",
            "sglang_reshard.verl",
            "benchmark.reference",
            "sglang_reshard.selftest.verl_run",
            "sglang_reshard.selftest.digests",
        ),
        _for_verl,
    ),
    "gpu": Kind(("sglang.srt.model_loader", "sglang.srt.models.registry", "sglang.srt.server_args")),
}


_BEGIN = "from support import zygote; zygote.begin({!r}, {})"


class Zygote:
    """One for each kind; this process's child, and gone with it."""

    def __init__(self, kind: str) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **sglangs.environment("newest" if kind == "newest" else "pinned"),
            **ORDINARY,
            **KINDS[kind].variables(),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",  # it starts its threads when it is imported
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        path = [*environment["PYTHONPATH"].split(os.pathsep), str(_TEST), str(_TEST.parent)]
        if kind != "newest":  # this process may have it on its own path, for the moment
            path = [p for p in path if p != str(sglangs.NEWEST)]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the zygote)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN.format(kind, theirs.fileno()), "." * _COMMAND_LINE],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        theirs.close()
        ours.settimeout(_START_S)
        try:
            _read(ours, 1)
        except (OSError, EOFError):
            self._process.kill()
            self._process.wait()
            self._log.seek(0)
            raise AssertionError(f"the zygote {kind!r} did not start:\n{self._log.read()[-6000:]}") from None
        ours.settimeout(None)
        self.forker = Forker(ours)

    def end(self) -> None:
        self.forker.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        self._log.close()


_zygotes: dict[str, Zygote] = {}


def zygote(kind: str) -> Zygote:
    """This session's, started when it is first asked for."""
    if kind not in _zygotes:
        if not _zygotes:
            atexit.register(end_all)
        _zygotes[kind] = Zygote(kind)
    return _zygotes[kind]


@contextlib.contextmanager
def forks(*kinds: str) -> Iterator[None]:
    """What this process starts inside is forked, and so is all that comes of it; not under `make test-all`.

    kinds  of zygotes that are made at once, for those who look at what processes this one has
    """
    before = _choose
    if not os.environ.get("SGLANG_RESHARD_SWEEP"):
        for kind in kinds:
            zygote(kind)
        _ask_from_now_on(_of_session)
    try:
        yield
    finally:
        _ask_from_now_on(before)


def is_fork() -> bool:
    """Whether this process and all that comes of it are forks."""
    return _choose is not None


def _of_session(environment: Environment) -> Forker | None:
    path = list(map(Path, filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))))
    kind = environment.get(VARIABLE) or ("newest" if sglangs.NEWEST in path else "cpu")
    another = [p for p in path if p != sglangs.NEWEST and (p / "sglang").exists()]
    return None if kind == "none" or another else zygote(kind).forker


def end_all() -> None:
    while _zygotes:
        _zygotes.popitem()[1].end()


@contextlib.contextmanager
def _low_numbers_taken() -> Iterator[None]:
    """What is opened meanwhile gets numbers above those that a fork will be given descriptors under."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    taken = [_dup_above(nothing, 3) for _ in range(LOW_NUMBERS)]
    try:
        yield
    finally:
        for fd in (nothing, *taken):
            os.close(fd)


def _import(kind: str) -> None:
    if kind == "gpu":
        from sglang_reshard.cli.plan.sglang_model import choose_code_paths

        choose_code_paths(4, gpu=True)
    for module in KINDS[kind].modules:
        importlib.import_module(module)
    if (registry := sys.modules.get("sglang.srt.plugins.hook_registry")) is not None:
        _look_for_functions_only(registry)
    setproctitle.getproctitle()  # it looks for where titles go, which it could not after `_show`
    gc.collect()
    gc.freeze()  # so that collections in the forks do not write to shared pages


def _look_for_functions_only(registry: Any) -> None:
    """Let a hook of a method be applied without a look at all names of all modules, which takes each process a second.

    SGLang looks there for other names of what is hooked, which a method does not have.
    """
    stock = registry._propagate_patch

    def propagate(original: object, wrapped: object, source: object) -> int:
        return 0 if isinstance(source, type) else stock(original, wrapped, source)

    registry._propagate_patch = propagate


def begin(kind: str, descriptor: int) -> None:
    """In the zygote: import, then fork for whoever asks. Returns in no process but the forks, when they are done."""
    del sys.path[0]  # the directory that this was started in
    connection = socket.socket(fileno=descriptor)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with _low_numbers_taken():
        before = _descriptors()
        _import(kind)
        _opened_by_imports.update(_descriptors() & _descriptors() - before)  # twice: looking opens one, too
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads in the zygote: {threading.enumerate()}"
    sys.stdout.flush()
    sys.stderr.flush()
    _show([sys.executable, "-c", _BEGIN.format(kind, descriptor)])
    connection.sendall(b".")
    try:
        order = _serve(connection)
    except _Forked as forked:
        order = forked.order
    if order is None:
        os._exit(0)
    _run(order.argv)
