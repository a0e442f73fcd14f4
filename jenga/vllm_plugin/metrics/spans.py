"""OpenTelemetry spans of admissions: what a request found in the cache, and why it had to wait.

vLLM makes one span for each request in the API server. The spans here belong to the same trace, and
the scheduler's process makes them.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from jenga.vllm_plugin.metrics.held_back import HeldBack
from jenga.vllm_plugin.metrics.series import HELD_BACK_REASONS
from jenga.vllm_plugin.settings.environment import BACKEND_NAME

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from jenga.errors import OutOfPagesError
    from jenga.manager import Manager
    from jenga.prefix.miss_log import Miss

logger = init_logger(f"vllm.{__name__}")

SPAN_NAME = "jenga.admission"

REQUEST_ID = "jenga.request.id"
PREEMPTIONS = "jenga.request.preemptions"
ASKED_TOKENS = "jenga.prefix.asked_tokens"
FOUND_TOKENS = "jenga.prefix.found_tokens"
BOUNDING_TABLE = "jenga.prefix.bounding_table"
BOUNDING_LAYER_TYPE = "jenga.prefix.bounding_layer_type"
NEVER_TOKENS = "jenga.prefix.never_tokens"
EVICTED_TOKENS = "jenga.prefix.evicted_tokens"
BARE_TOKENS = "jenga.prefix.bare_tokens"
LOSS_CAUSE = "jenga.prefix.loss_cause"
LOSS_TOKENS = "jenga.prefix.loss_tokens"
HELD_BACK_SECONDS = {reason: f"jenga.held_back.{reason}_seconds" for reason in HELD_BACK_REASONS}

ATTRIBUTES = (
    REQUEST_ID,
    PREEMPTIONS,
    ASKED_TOKENS,
    FOUND_TOKENS,
    BOUNDING_TABLE,
    BOUNDING_LAYER_TYPE,
    NEVER_TOKENS,
    EVICTED_TOKENS,
    BARE_TOKENS,
    LOSS_CAUSE,
    LOSS_TOKENS,
    *HELD_BACK_SECONDS.values(),
)
"""Names of all attributes. `docs/metrics.md` explains them to users."""

Attributes = dict[str, str | int | float]


def lookup_attributes(miss: "Miss") -> Attributes:
    """Get the attributes that say what a look-up found, and why not more.

    Args:
        miss: Record of the look-up.

    Returns:
        Name of an attribute -> its value. The page table and the cause of loss are left out if no
        page table bounded the hit, or nothing was lost.
    """
    attributes: Attributes = {
        ASKED_TOKENS: miss.asked_tokens,
        FOUND_TOKENS: miss.found_tokens,
        NEVER_TOKENS: miss.never_tokens,
        EVICTED_TOKENS: miss.evicted_tokens,
        BARE_TOKENS: miss.bare_tokens,
    }
    if miss.table:
        attributes |= {BOUNDING_TABLE: miss.table, BOUNDING_LAYER_TYPE: miss.layer_type}
    lost_tokens: Counter[str] = Counter()
    for each in miss.losses:
        lost_tokens[str(each.loss.cause)] += each.evicted_tokens + each.bare_tokens
    for cause, num_tokens in lost_tokens.most_common(1):
        attributes |= {LOSS_CAUSE: cause, LOSS_TOKENS: num_tokens}
    return attributes


@dataclass(frozen=True, slots=True)
class _Wait:
    """A request that waits.

    Attributes:
        start_s: Time when it began to wait, in seconds.
        held_back: Its refused admissions.
    """

    start_s: float
    held_back: HeldBack


class AdmissionSpans:
    """Makes a span for each admission of a request, in the trace of the request.

    The span begins when the request enters the queue, at its arrival or its preemption. It ends at
    its admission. A request without trace headers gets a trace of its own, as it does in vLLM.

    A failure does not stop the engine. It is logged once, and then no further span is made.
    """

    __slots__ = (
        "_clock",
        "_context_of",
        "_has_failed",
        "_instrument",
        "_manager",
        "_no_context",
        "_pass_on",
        "_waiting",
    )

    def __init__(
        self,
        manager: "Manager",
        endpoint: str,
        *,
        pass_on: Callable[[list["Miss"]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to record look-ups, and open a tracer if this process has none.

        Args:
            manager: Manager that admits the requests.
            endpoint: URL to which spans are sent.
            pass_on: Function that gets the records of look-ups that are taken from the manager. Its
                owner also takes the manager's evictions. None means that these spans are the only
                reader of both.
            clock: Function that returns the time in seconds.

        Raises:
            ImportError: OpenTelemetry or vLLM's tracing is missing.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import ProxyTracerProvider, get_tracer_provider
        from vllm.tracing import extract_trace_context, init_tracer, instrument_manual

        # The engine core's process opens a tracer only if it inherits the endpoint from one that
        # has done so. With several API servers it does not.
        if isinstance(get_tracer_provider(), ProxyTracerProvider):
            init_tracer("vllm.engine_core", endpoint, {"vllm.process_kind": "engine_core"})
        self._context_of = extract_trace_context
        self._instrument = instrument_manual
        # Without a context vLLM would take the one in which the process was started.
        self._no_context = Context()
        self._manager = manager
        self._pass_on = pass_on
        self._clock = clock
        self._waiting: dict[str, _Wait] = {}
        self._has_failed = False
        manager.record_evictions()

    def step_starts(self) -> None:
        """Drop the evictions of the last step, unless another reader takes them."""
        if self._pass_on is None:
            self._manager.take_evictions()

    def wait(self, request_id: str) -> None:
        """Record that a request is in the queue. Only the first call before an admission counts."""
        if not self._has_failed and request_id not in self._waiting:
            self._waiting[request_id] = _Wait(self._clock(), HeldBack(self._clock))

    def refuse(self, request_id: str, error: "OutOfPagesError") -> None:
        """Record that a request was not admitted."""
        self.wait(request_id)
        if not self._has_failed:
            self._waiting[request_id].held_back.refuse(request_id, error)

    def forget(self, request_id: str) -> None:
        """Record that a request has ended. It need not have waited."""
        self._waiting.pop(request_id, None)

    def admit(self, request: "Request") -> None:
        """Make the span of a request that has just been admitted.

        Args:
            request: The request. It need not have waited.
        """
        self.wait(request.request_id)
        misses = self._manager.take_misses()
        if self._pass_on is not None:
            self._pass_on(misses)
        if self._has_failed:
            return
        try:
            self._make(request, self._waiting.pop(request.request_id), misses)
        except Exception as error:  # on any error, requests are still served
            self._has_failed = True
            self._waiting.clear()
            logger.warning("%s: spans of admissions end here: %r", BACKEND_NAME, error)

    def _make(self, request: "Request", wait: _Wait, misses: list["Miss"]) -> None:
        name = request.request_id
        end_ns, waited_s = time.time_ns(), self._clock() - wait.start_s
        attributes: Attributes = {REQUEST_ID: name, PREEMPTIONS: request.num_preemptions}
        # An admission may have been undone since the last call. Its look-up comes first.
        for miss in [each for each in misses if each.request == name][-1:]:
            attributes |= lookup_attributes(miss)
        wait.held_back.end(name)
        for reason, num_requests in wait.held_back.num_requests.items():
            if num_requests:
                attributes[HELD_BACK_SECONDS[reason]] = wait.held_back.seconds[reason]
        self._instrument(
            span_name=SPAN_NAME,
            start_time=end_ns - int(waited_s * 1e9),
            end_time=end_ns,
            attributes=attributes,
            context=self._context_of(request.trace_headers) or self._no_context,
        )


def open_spans(
    manager: "Manager",
    endpoint: str | None,
    *,
    pass_on: Callable[[list["Miss"]], None] | None = None,
) -> AdmissionSpans | None:
    """Open the spans of an engine's admissions, if vLLM traces requests.

    Args:
        manager: Manager that admits the requests.
        endpoint: URL to which vLLM sends spans. None means that it traces nothing.
        pass_on: See `AdmissionSpans`.

    Returns:
        The spans, or None if there is no endpoint or no tracer can be opened.
    """
    if endpoint is None:
        return None
    try:
        return AdmissionSpans(manager, endpoint, pass_on=pass_on)
    except Exception as error:  # on any error, requests are still served
        logger.warning("%s: no spans of admissions: %r", BACKEND_NAME, error)
        return None
