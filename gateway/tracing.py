"""Spans: one for each call, and in it one for each time that a hook is asked; names, ids and outcomes, no contents.

They go where OpenTelemetry's SDK is set up to send them (`opentelemetry-instrument sandgate serve`); without one
nothing is written, at no cost.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

from gateway.hooks.hook import HookContext, TurnContext
from gateway.models import ToolCall

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_OFF: Final = nullcontext(None)


class Spans:
    """Writes spans with a tracer, or none at all."""

    def __init__(self, tracer: "Tracer | None" = None) -> None:
        self._tracer = tracer

    def call(self, call: ToolCall) -> AbstractContextManager["Span | None"]:
        """The span of one call; `ended` tells its status."""
        if self._tracer is None:
            return _OFF
        names = {"sandgate.session.id": call.session_id, "sandgate.call.id": call.id, "sandgate.tool": call.tool}
        return self._span("sandgate.call", names)

    def hook(
        self, name: str, kind: str, point: str, ctx: HookContext | TurnContext
    ) -> AbstractContextManager["Span | None"]:
        """The span of asking one hook at one point; `ended` tells its decision."""
        if self._tracer is None:
            return _OFF
        names = {
            "sandgate.hook.name": name,
            "sandgate.hook.type": kind,
            "sandgate.hook.point": point,
            "sandgate.session.id": ctx.session.id,
        }
        if isinstance(ctx, HookContext):
            names |= {"sandgate.call.id": ctx.call.id, "sandgate.tool": ctx.call.tool}
        if ctx.turn is not None:
            names["sandgate.turn.id"] = ctx.turn.id
        return self._span("sandgate.hook", names)

    def _span(self, name: str, attributes: dict[str, str]) -> AbstractContextManager["Span | None"]:
        assert self._tracer is not None  # asked before
        return self._tracer.start_as_current_span(  # an exception's text may hold contents
            name, attributes=attributes, record_exception=False, set_status_on_exception=False
        )


def ended(span: "Span | None", outcome: str, *, failed: bool) -> None:
    """Say how what a span stands for ended: a status or a decision."""
    if span is None:
        return
    from opentelemetry.trace import StatusCode

    span.set_attribute("sandgate.outcome", outcome)
    if failed:
        span.set_status(StatusCode.ERROR)


def configured_spans() -> Spans:
    """Spans where OpenTelemetry is installed and its SDK set up, which `opentelemetry-instrument` does."""
    try:
        from opentelemetry import trace
    except ImportError:  # the base install and `[server]` have no OpenTelemetry
        return Spans()
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return Spans()
    return Spans(trace.get_tracer("sandgate"))
