"""The engine's own loader as the target layout: which checkpoint element goes where in the live parameters."""

from sglang_reshard.trace.live import live_signature
from sglang_reshard.trace.program import Copy, Program, Step
from sglang_reshard.trace.signature import LiveSignature
from sglang_reshard.trace.tracer import trace

__all__ = ["Copy", "LiveSignature", "Program", "Step", "live_signature", "trace"]
