"""Classes that several threads decode for the first time at once, in a process of its own: msgspec would crash it."""

import subprocess
import sys
import textwrap

PROGRAM = """
    import sys, threading
    import msgspec
    from sglang_reshard.layout.decoders import json_decoder, msgpack_decoder

    sys.setswitchinterval(1e-6)
    message = {"inner": {"a": 1, "b": {"k": [1, 2]}}, "several": [{"a": 2}], "word": "q"}
    packed, text = msgspec.msgpack.encode(message), msgspec.json.encode(message)
    calls = (
        lambda kind: msgpack_decoder(kind).decode(packed),
        lambda kind: json_decoder(kind).decode(text),
    )
    found = set()
    for _ in range(200):
        Inner = msgspec.defstruct("Inner", [("a", int), ("b", dict[str, tuple[int, ...]], {})])
        Outer = msgspec.defstruct("Outer", [("inner", Inner), ("several", list[Inner]), ("word", str | None, None)])
        ready = threading.Barrier(len(calls))

        def decode(call, kind=Outer, ready=ready):
            ready.wait()
            found.add(call(kind).inner.b["k"])

        threads = [threading.Thread(target=decode, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(found)
"""


def test_threads_that_decode_a_class_for_the_first_time_do_not_crash():
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "{(1, 2)}\n"), ran.stderr
