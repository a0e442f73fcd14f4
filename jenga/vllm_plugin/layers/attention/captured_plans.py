"""Attention plans that CUDA graphs were captured with, one for each batch size."""

from dataclasses import replace

import torch

from jenga_kernels.plans.attention_plan import AttentionPlan


class CapturedPlans:
    """Plans whose work lists keep their addresses, because CUDA graphs hold these."""

    def __init__(self) -> None:
        # (requests, tokens) of a captured batch -> its plan
        self._plans: dict[tuple[int, int], AttentionPlan] = {}

    def keep(self, plan: AttentionPlan, *, max_query_tokens: int) -> AttentionPlan:
        """Keep the plan of a batch that is captured now, unless there is one for its size.

        Args:
            plan: Plan of the batch.
            max_query_tokens: Largest number of query tokens of a request, for the error message.

        Returns:
            The plan to capture.

        Raises:
            NotImplementedError: The batch mixes decoding with requests that are too long to decode,
                so a replay could need another number of programs.
        """
        if plan.max_row_tiles and plan.decode_query_tokens:
            msg = (
                f"a CUDA graph must have at most {plan.decode_query_tokens} query tokens per "
                f"request, got {max_query_tokens}"
            )
            raise NotImplementedError(msg)
        size = (plan.num_requests, plan.num_tokens)
        if size not in self._plans:
            self._plans[size] = self._with_shared_partials(plan)
        return self._plans[size]

    def updated(
        self,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        num_tokens: int,
        max_query_tokens: int,
    ) -> AttentionPlan | None:
        """Get the kept plan for a batch size, with its work lists updated in place.

        Args:
            query_starts: i32[num_requests + 1], index of each request's first token, and the end.
            seq_lens: i32[num_requests], number of tokens of each request.
            num_tokens: Number of tokens in the batch, padding included.
            max_query_tokens: Largest number of query tokens of a request.

        Returns:
            The plan, or None if none is kept that serves the batch.
        """
        plan = self._plans.get((seq_lens.shape[0], num_tokens))
        if plan is None:
            return None
        if plan.decode_query_tokens and max_query_tokens > plan.max_decoded_tokens:
            return None
        plan.update(query_starts, seq_lens)
        return plan

    def _with_shared_partials(self, plan: AttentionPlan) -> AttentionPlan:
        """Let a plan store partial results of splits in the buffer of a larger plan.

        This is safe because steps run one after another. vLLM captures the largest batch first.
        """
        num_partials = plan.partial_out.shape[0]
        for other in self._plans.values():
            if other.partial_out.shape[0] >= num_partials:
                return replace(
                    plan,
                    partial_out=other.partial_out[:num_partials],
                    partial_lse=other.partial_lse[:num_partials],
                )
        return plan
