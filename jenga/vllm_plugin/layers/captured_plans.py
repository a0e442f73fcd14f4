"""Plans that CUDA graphs were captured with, one per size of a batch."""

from dataclasses import replace

import torch

from jenga_kernels.attention_plan import AttentionPlan


class CapturedPlans:
    """Work lists that stay where they are, because a CUDA graph holds their addresses."""

    def __init__(self) -> None:
        # (requests, tokens) of a captured batch -> its plan
        self._plans: dict[tuple[int, int], AttentionPlan] = {}

    def keep(self, plan: AttentionPlan, *, max_query_tokens: int) -> AttentionPlan:
        """Keep the plan of a batch that is captured now, unless its size has one.

        Args:
            plan: Of the batch.
            max_query_tokens: No request of it has more, for the message.

        Returns:
            The plan to capture.

        Raises:
            NotImplementedError: A request of it is not decoded where others are, so a replay could
                differ in the number of programs.
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
        """Get the kept plan of a batch's size, made anew for its requests; None without one.

        Args:
            query_starts: i32[num_requests + 1].
            seq_lens: i32[num_requests].
            num_tokens: Tokens of the batch, padding included.
            max_query_tokens: No request has more.
        """
        plan = self._plans.get((seq_lens.shape[0], num_tokens))
        if plan is None:
            return None
        if plan.decode_query_tokens and max_query_tokens > plan.max_decoded_tokens:
            return None
        plan.update(query_starts, seq_lens)
        return plan

    def _with_shared_partials(self, plan: AttentionPlan) -> AttentionPlan:
        """Let a plan keep parts of split results where a larger one keeps its own.

        No two steps run at once, and vLLM captures the largest batch first.
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
