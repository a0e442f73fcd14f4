"""The distance from the end of a prompt at which a guess is left, before its question.

The next prompt with the same text often ends with another question. Where a question begins is not
known until then, so the distance is learnt from how recent prompts parted from known texts. If it
is too short, the guess lies within the question and is not found. If it is too long, the tokens
between the guess and the question are computed again.
"""

QUESTION_TOKENS = 512
"""Least distance, and the distance while nothing is known. Most questions are shorter."""

FACTORS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
"""Distances that are compared, in units of the least one."""

REMEMBERED_PROMPTS = 64
"""Number of prompts after which the weight of a prompt has fallen to about a third."""


class QuestionLength:
    """Learns the distance that lets recent prompts find the most tokens."""

    __slots__ = ("_distances", "_found_tokens")

    def __init__(self) -> None:
        """Start without prompts."""
        self._distances = [int(factor * QUESTION_TOKENS) for factor in FACTORS]
        # For each distance, tokens that prompts would have found, with weights.
        self._found_tokens = [0.0] * len(self._distances)

    def observe(self, prompt_tokens: int, shared_tokens: int) -> None:
        """Record a prompt that begins as a known text does.

        Args:
            prompt_tokens: Number of tokens of the prompt.
            shared_tokens: Number of its first tokens that the text has too.
        """
        kept = 1 - 1 / REMEMBERED_PROMPTS
        for index, distance in enumerate(self._distances):
            found_tokens = prompt_tokens - distance
            if not 0 < found_tokens <= shared_tokens:
                found_tokens = 0
            self._found_tokens[index] = kept * self._found_tokens[index] + found_tokens

    def distance(self, prompt_tokens: int) -> int:
        """Return the distance for a prompt, in tokens. At most half of a prompt is a question."""
        most_tokens, best = prompt_tokens // 2, 0
        for index, found_tokens in enumerate(self._found_tokens):
            if self._distances[index] <= most_tokens and found_tokens > self._found_tokens[best]:
                best = index
        return self._distances[best]
