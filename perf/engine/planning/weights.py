"""Random weights with which errors in the cache show: outputs depend on the tokens attended to.

vLLM's own dummy weights are so small that attention is uniform, and that layers add almost nothing.
Two engines would then agree whatever their caches hold. The weights here differ in three points:
matrix products preserve the scale of their input, attention is sharp, and the layers' output
outweighs the last token.
"""

import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHARPNESS = 2.0
"""Scale of queries and keys, at which a few of thousands of keys get most of the attention."""

EMBEDDING_SHARE = 0.1
"""Scale of embeddings relative to what layers add to them."""

BRANCH_SHARE = 0.02
"""Scale of the layers' output in models whose next token should depend on the last one alone."""

BRANCH_ENDS = ("o_proj.weight", "down_proj.weight")

_HEAD, _EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
_LAST_NORMS = ("model.norm.weight", "model.norm_f.weight", "model.final_layernorm.weight")


def fill(model: "torch.nn.Module") -> None:
    """Fill the weights of a model with random numbers, which are the same in every process.

    Args:
        model: Model that vLLM has created, on its device. It is written in place.
    """
    owners = {id(each): kind for kind in model.modules() for each in kind.parameters(recurse=False)}
    parameters = dict(model.named_parameters())
    has_head = any(name.endswith(_HEAD) for name in parameters)
    for name, parameter in parameters.items():
        if not parameter.is_floating_point() or parameter.element_size() == 1:
            continue
        scale = 1.0
        if name.endswith(_EMBEDDINGS):
            scale = EMBEDDING_SHARE
        elif name.endswith(_LAST_NORMS) and not has_head:
            scale = 1 / EMBEDDING_SHARE  # the head is the embeddings
        elif "qkv_proj" in name or "q_norm" in name or "k_norm" in name:
            scale = SHARPNESS
        _fill_one(name, parameter.data, type(owners[id(parameter)]).__name__, scale)


def _fill_one(name: str, weight: "torch.Tensor", owner: str, scale: float) -> None:
    import torch

    generator = torch.Generator(device=weight.device)
    generator.manual_seed(zlib.crc32(name.encode()))
    last = name.rsplit(".", 1)[-1]

    def uniform(low: float, high: float) -> None:
        weight.uniform_(low, high, generator=generator)

    if last == "A_log":  # decays that remember hundreds of tokens
        uniform(-4.0, 0.0)
    elif last == "A":  # vLLM stores A as minus its exponential
        uniform(-1.0, -(2.0**-6))
    elif last == "D":
        weight.fill_(1.0)
    elif last == "dt_bias":
        weight.fill_(-2.0)
    elif weight.dim() > 1:
        # The variance is 1 / the number of elements that a product sums, times the square of the
        # scale.
        bound = scale * (3.0 / weight.shape[-1]) ** 0.5
        uniform(-bound, bound)
    elif "norm" in name and last == "weight":
        weight.fill_(scale - 1.0 if owner.startswith("Gemma") else scale)  # Gemma's add one
    else:
        uniform(-0.1, 0.1)


def speak_in_order(model: "torch.nn.Module", *, wrong_share: float) -> None:
    """Make a model predict token i + 1 after token i, except for a share of tokens.

    A model and its draft then agree as often as real ones do, whatever their widths.

    Args:
        model: Filled model, with a head of its own. It is written in place.
        wrong_share: Share of tokens, 0 to 1, after which the model predicts another token.
    """
    import torch

    parameters = dict(model.named_parameters())
    head = next(each.data for name, each in parameters.items() if name.endswith(_HEAD))
    words = next(each.data for name, each in parameters.items() if name.endswith(_EMBEDDINGS))
    for name, parameter in parameters.items():
        if name.endswith(BRANCH_ENDS):
            parameter.data.mul_(BRANCH_SHARE)
    words.mul_(words.shape[-1] ** 0.5 / EMBEDDING_SHARE)
    head.copy_(words.roll(1, dims=0) * words.shape[-1] ** -0.5)
    generator = torch.Generator(device="cpu").manual_seed(0)
    is_wrong = torch.rand(len(head), generator=generator) < wrong_share
    head[is_wrong.to(head.device)] = 0.0


def install(draft_folder: str | None, draft_acceptance: float) -> None:
    """Make vLLM's loader of dummy weights fill models this way from now on.

    Args:
        draft_folder: Folder of the draft model. None if there is none.
        draft_acceptance: Share of its tokens, 0 to 1, that the target should accept.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load_weights = DummyModelLoader.load_weights

    def load_and_fill(self: Any, model: Any, model_config: Any) -> None:  # noqa: ANN401
        load_weights(self, model, model_config)
        fill(model)
        if draft_folder is not None:
            is_draft = model_config.model == draft_folder
            speak_in_order(model, wrong_share=1 - draft_acceptance if is_draft else 0.0)

    DummyModelLoader.load_weights = load_and_fill
