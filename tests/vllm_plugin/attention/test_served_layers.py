"""Layers that read their cache with kernels of their own are refused when an engine starts."""

from types import SimpleNamespace

import pytest

from jenga.vllm_plugin.settings.refusals import Refusal
from jenga.vllm_plugin.specs import image_rows
from tests.vllm_plugin.settings.test_switch import run_python

pytestmark = pytest.mark.vllm


def config_of(layers, *, is_selected=True):
    """Get what of an engine's configuration says which layers there are, and on which backend."""
    from jenga.vllm_plugin.settings.switch import backend_member

    return SimpleNamespace(
        model_config=None,
        compilation_config=SimpleNamespace(static_forward_context=layers),
        attention_config=SimpleNamespace(backend=backend_member() if is_selected else None),
    )


def attention(cls=None, *, backend=None, shares=None):
    """Get a layer of vLLM's Attention, or of a class made of it, that stores or shares a cache."""
    from vllm.model_executor.layers.attention import Attention

    from jenga.vllm_plugin.layers.attention.backend import JengaTritonBackend

    cls = cls or Attention
    layer = cls.__new__(cls)
    layer.attn_backend = backend or JengaTritonBackend
    layer.kv_sharing_target_layer_name = shares
    return layer


def stock_backend():
    """Get a backend of vLLM's that attends on any platform."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend


def own_layer(backend):
    """Get a layer of a class that no other model has, as those of MiniMax M3 and Kimi K3 are."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class SparseAttention(AttentionLayerBase):
        def get_attn_backend(self):
            return backend

        def get_kv_cache_spec(self, vllm_config):
            raise NotImplementedError

    return SparseAttention()


def check(layers, stored=None):
    from jenga.vllm_plugin.layers.served_layers import check_layers

    check_layers(config_of(layers), layers if stored is None else stored)


def test_attention_on_our_backend_is_served():
    from vllm.model_executor.layers.attention import ChunkedLocalAttention, CrossAttention

    from jenga.vllm_plugin.layers.attention.cross_attention import JengaCrossBackend

    check(
        {
            "full": attention(),
            "chunked": attention(ChunkedLocalAttention),
            "cross": attention(CrossAttention, backend=JengaCrossBackend),
        }
    )


def test_latent_attention_is_served_on_our_backend_alone():
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

    from jenga.vllm_plugin.layers.attention.latent import JengaLatentBackend

    class PaddedAttention(MLAAttention):
        pass

    check({"latent": attention(MLAAttention, backend=JengaLatentBackend)})
    with pytest.raises(ValueError, match=r"'padded'.*PaddedAttention.* backend TRITON_MLA"):
        check({"padded": attention(PaddedAttention, backend=TritonMLABackend)})


def test_recurrent_layers_are_served_on_whatever_backend_they_have():
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    class Recurrence(MambaBase):
        mamba_type = None

        def get_state_shape(self):
            raise NotImplementedError

        def get_state_dtype(self):
            raise NotImplementedError

    check({"recurrent": Recurrence()})


def test_attention_on_another_backend_is_refused():
    with pytest.raises(ValueError, match=r"1 of them, .*'second' .*\.Attention with .* CPU_ATTN"):
        check({"first": attention(), "second": attention(backend=stock_backend())})


def test_layers_of_a_class_of_their_own_are_refused_on_any_backend():
    from jenga.vllm_plugin.layers.attention.backend import JengaTritonBackend

    for backend in (JengaTritonBackend, stock_backend()):
        with pytest.raises(ValueError, match="1 of them, of which 'own' is a"):
            check({"first": attention(), "own": own_layer(backend)})


def test_the_refusal_names_the_first_layer_its_class_its_backend_and_how_many_there_are():
    layers = {"first": attention(), "second": own_layer(stock_backend())}
    layers |= {"third": attention(backend=stock_backend())}

    with pytest.raises(ValueError, match="JENGA_TRITON") as refusal:
        check(layers)

    message = str(refusal.value)
    assert "'second'" in message
    assert f"{__name__}.own_layer.<locals>.SparseAttention" in message
    assert "CPU_ATTN (vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend)" in message
    assert "Attention and MLAAttention" in message
    assert "got 2 of them" in message


def test_layers_without_a_cache_may_attend_as_they_like():
    check({"encoder": own_layer(stock_backend()), "full": attention()}, stored={"full"})


def test_a_rank_without_layers_has_none_that_are_refused():
    check({})
    check({"experts": object()})


def test_layers_that_share_a_cache_are_held_to_the_same():
    check({"full": attention(), "sharing": attention(shares="full")}, stored={"full"})

    sharing = attention(backend=stock_backend(), shares="full")
    with pytest.raises(ValueError, match="'sharing'"):
        check({"full": attention(), "sharing": sharing}, stored={"full"})


def get_specs(vllm_config, specs):
    """Call what takes the place of the worker's method, whose own gives these specs."""
    from jenga.vllm_plugin.patches.workers import WORKERS

    (method,) = (each for each in WORKERS if each.name == "Worker.get_kv_cache_spec")
    worker = SimpleNamespace(vllm_config=vllm_config, model_runner=None)
    return method.make(lambda self: specs)(worker)  # noqa: ARG005 (as the original's)


def test_workers_tell_what_layers_store_where_all_are_served(monkeypatch):
    # There is neither a loaded model nor a whole configuration.
    monkeypatch.setattr(image_rows, "measured_spec", lambda *_, **__: None)
    monkeypatch.setattr("jenga.vllm_plugin.config.host_bytes", lambda _: 0)
    layers, specs = {"full": attention(), "encoder": own_layer(stock_backend())}, {"full": "spec"}

    assert get_specs(config_of(layers), specs) is specs


def test_workers_refuse_no_layer_unless_the_backend_is_selected():
    layers, specs = {"own": own_layer(stock_backend())}, {"own": "spec"}

    assert get_specs(config_of(layers, is_selected=False), specs) is specs
    with pytest.raises(ValueError, match="'own'"):
        get_specs(config_of(layers), specs)


def test_an_engine_refuses_a_model_whose_layer_attends_on_a_backend_of_its_own(tiny_model):
    code = f"""
    from vllm import LLM
    from vllm.model_executor.models import llama
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    name = "CPU_ATTN" if current_platform.is_cpu() else "TRITON_ATTN"

    class OwnAttention(llama.Attention):
        def __init__(self, *args, prefix, **options):
            if ".1." in prefix:
                options["attn_backend"] = AttentionBackendEnum[name].get_class()
            super().__init__(*args, prefix=prefix, **options)

    llama.Attention = OwnAttention
    try:
        LLM({str(tiny_model("llama"))!r}, attention_backend="JENGA_TRITON", dtype="float32",
            enforce_eager=True, max_model_len=256, skip_tokenizer_init=True,
            kv_cache_memory_bytes=1 << 24, gpu_memory_utilization=0.05)
    except ValueError as error:
        print("REFUSED", error)
    """
    _, output = run_python(code)

    (refusal,) = (line for line in output.splitlines() if line.startswith("REFUSED"))
    assert "1 of them, of which 'model.layers.1.self_attn.attn' is a" in refusal
    assert "OwnAttention" in refusal
    assert Refusal.OWN_KERNELS.value.feature in refusal
