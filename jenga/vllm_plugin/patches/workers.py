"""Replaced names of vLLM's workers and attention layers, in a process that has its device."""

import functools
from dataclasses import replace
from typing import Any

from jenga.vllm_plugin.patches.patch import Function, Replacement


def _warmup_kernels(original: Function) -> Function:
    @functools.wraps(original)
    def warmup_kernels(model_runner: Any, *steps: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        if not is_selected(model_runner.vllm_config):
            original(model_runner, *steps)
            return
        from jenga.vllm_plugin.arena.layout import geometry_of
        from jenga.vllm_plugin.worker.warm_up import on_pages_apart, warm_up

        execute_model, *others = steps
        geometry = geometry_of(model_runner.kv_cache_config)
        with model_runner.jenga_mailbox.warming_up():
            original(model_runner, on_pages_apart(execute_model, geometry), *others)
            warm_up(model_runner, *steps)

    return warmup_kernels


def _get_kv_cache_spec(original: Function) -> Function:
    @functools.wraps(original)
    def get_kv_cache_spec(self: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected
        from jenga.vllm_plugin.layers.attention.latent_builder import count_absorbed
        from jenga.vllm_plugin.layers.served_layers import check_layers
        from jenga.vllm_plugin.specs.image_rows import IMAGE_LAYER, measured_spec
        from jenga.vllm_plugin.specs.token_budgets import check_budgets

        specs = original(self)
        if is_selected(self.vllm_config):
            check_budgets(self.vllm_config, specs)
            check_layers(self.vllm_config, stored=specs)
            count_absorbed(self.vllm_config)
            rows = measured_spec(self.vllm_config, self.model_runner)
            if rows is not None:
                specs = {**specs, IMAGE_LAYER: rows}
        return specs

    return get_kv_cache_spec


def _initialize_from_config(original: Function) -> Function:
    @functools.wraps(original)
    def initialize_from_config(self: Any, kv_cache_config: Any) -> None:  # noqa: ANN401
        import vllm.envs

        from jenga.vllm_plugin.arena.layout import JengaKVCacheConfig, host_memory_bytes
        from jenga.vllm_plugin.arena.starts import report_graphs
        from jenga.vllm_plugin.layers.attention.image_batches import follow_batch
        from jenga.vllm_plugin.layers.attention.token_budgets import follow_prompts
        from jenga.vllm_plugin.trials.tried_kernels import choose_kernels
        from jenga.vllm_plugin.worker.host_memory import HostMemory
        from jenga.vllm_plugin.worker.step_embeddings import open_embeddings
        from jenga.vllm_plugin.worker.step_mailbox import builders_of, open_mailbox

        original(self, kv_cache_config)
        if isinstance(kv_cache_config, JengaKVCacheConfig):
            report_graphs(
                getattr(self, "cudagraph_memory_estimate", 0),
                kv_cache_config,
                is_left_out=vllm.envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS,
            )
            runner = self.model_runner
            mailbox = open_mailbox(runner)
            follow_batch(runner)
            follow_prompts(runner)
            open_embeddings(runner, kv_cache_config)
            num_bytes = host_memory_bytes(kv_cache_config)
            if num_bytes:
                mailbox.host_memory = HostMemory(runner.device, num_bytes)
            # With Ray, data-parallel engines append their numbers to the id.
            start = self.vllm_config.instance_id.partition("_dp")[0]
            choose_kernels(builders_of(runner), runner.device, start=start)

    return initialize_from_config


def _allocate_kv_cache(original: Function) -> Function:
    @functools.wraps(original)
    def allocate_kv_cache(
        kv_cache_config: Any,  # noqa: ANN401
        device: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        from torch import device as torch_device

        from jenga.vllm_plugin.arena.joined import is_shared, views_of_shared_arena

        if not is_shared(kv_cache_config):
            return original(kv_cache_config, device, *args, **kwargs)
        views = original(kv_cache_config, torch_device("meta"), *args, **kwargs)
        return views_of_shared_arena(kv_cache_config.shared_arena, views, device)

    return allocate_kv_cache


def _init_minimal_kv_cache_for_profiling(original: Function) -> Function:
    @functools.wraps(original)
    def init_minimal_kv_cache_for_profiling(runner: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.arena.config_builder import thrown_away

        with thrown_away():
            original(runner)

    return init_minimal_kv_cache_for_profiling


def _batch_mm_inputs_from_scheduler(original: Function) -> Function:
    @functools.wraps(original)
    def batch(self: Any, scheduler_output: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.worker.step_mailbox import mailbox_of

        inputs, mailbox = scheduler_output.scheduled_encoder_inputs, mailbox_of(self)
        if inputs and self.model_config.is_encoder_decoder and mailbox is not None:
            row_of = self.input_batch.req_id_to_index
            names = sorted(inputs, key=row_of.__getitem__)
            mailbox.encoded_rows = tuple(row_of[name] for name in names)
            ordered = {name: inputs[name] for name in names}
            scheduler_output = replace(scheduler_output, scheduled_encoder_inputs=ordered)
        return original(self, scheduler_output)

    return batch


def _execute_mm_encoder(original: Function) -> Function:
    @functools.wraps(original)
    def execute(self: Any, scheduler_output: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.layers.attention.image_batches import (
            batch_of,
            image_builders,
            store_encoded,
        )

        outputs = original(self, scheduler_output)
        builders = image_builders(self.attn_groups) if outputs else []
        if builders:
            inputs = scheduler_output.scheduled_encoder_inputs
            store_encoded(self.model, builders, batch_of(self), inputs, outputs)
            self.encoder_cache.clear()
        return outputs

    return execute


def _determine_batch_execution_and_padding(original: Function) -> Function:
    @functools.wraps(original)
    def determine(
        self: Any,  # noqa: ANN401
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        # Callers set this argument only to capture a graph, or to run a dummy step.
        if named.get("force_uniform_decode") is None and is_selected(self.vllm_config):
            computed = self.input_batch.num_computed_tokens_cpu[:num_reqs]
            reads_prompt = computed < self.input_batch.num_prompt_tokens[:num_reqs]
            is_decoded = (computed > 0) & (num_scheduled_tokens_np[:num_reqs] == 1)
            if (reads_prompt & ~is_decoded).any():
                named["force_uniform_decode"] = False
        return original(self, num_tokens, num_reqs, num_scheduled_tokens_np, *args, **named)

    return determine


def _prepare_inputs_embeds(original: Function) -> Function:
    @functools.wraps(original)
    def prepare(
        self: Any,  # noqa: ANN401
        scheduled_encoder_inputs: Any,  # noqa: ANN401
        input_batch: Any,  # noqa: ANN401
        req_states: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.worker.step_mailbox import mailbox_of

        mailbox = mailbox_of(self)
        if mailbox is not None:
            names = enumerate(input_batch.req_ids)
            rows = tuple(row for row, name in names if scheduled_encoder_inputs.get(name))
            mailbox.encoded_rows = rows
        return original(self, scheduled_encoder_inputs, input_batch, req_states)

    return prepare


def _attention_init(original: Function) -> Function:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **named: Any) -> None:  # noqa: ANN401
        from vllm.config import get_current_vllm_config

        from jenga.vllm_plugin.config import is_selected
        from jenga.vllm_plugin.layers.attention.token_budgets import JengaBudgetBackend
        from jenga.vllm_plugin.specs.token_budgets import budget_of_layer

        chosen, config = named.get("attn_backend"), get_current_vllm_config()
        if not is_selected(config):
            original(self, *args, **named)
            return
        if chosen is not None and chosen.get_name().endswith("_DIFFKV"):
            del named["attn_backend"]
        source = named.get("kv_sharing_target_layer_name")
        budget = budget_of_layer(config, named.get("prefix", ""), source=source)
        if budget is not None:
            named["attn_backend"] = JengaBudgetBackend
        original(self, *args, **named)
        if budget is not None:
            self.jenga_budget = budget

    return init


def _attention_spec(original: Function) -> Function:
    @functools.wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.specs.token_budgets import budget_spec

        spec, budget = original(self, vllm_config), getattr(self, "jenga_budget", None)
        return spec if budget is None else budget_spec(spec, budget)

    return get_kv_cache_spec


def _create_cross_attention_backend(original: Function) -> Function:
    @functools.wraps(original)
    def create(underlying_attn_backend: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.layers.attention.backend import JengaTritonBackend
        from jenga.vllm_plugin.layers.attention.cross_attention import JengaCrossBackend

        if issubclass(underlying_attn_backend, JengaTritonBackend):
            return JengaCrossBackend
        return original(underlying_attn_backend)

    return create


def _create_chunked_local_attention_backend(original: Function) -> Function:
    @functools.wraps(original)
    def create(underlying_attn_backend: Any, attention_chunk_size: int) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.layers.attention.backend import JengaTritonBackend

        if issubclass(underlying_attn_backend, JengaTritonBackend):
            return underlying_attn_backend
        return original(underlying_attn_backend, attention_chunk_size)

    return create


def _takes_orders(original: Function) -> Function:
    @functools.wraps(original)
    def take_orders(self: Any, scheduler_output: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.arena.joined import check_memory
        from jenga.vllm_plugin.orders.step_orders import attached_orders
        from jenga.vllm_plugin.worker.step_mailbox import mailbox_of

        mailbox, orders = mailbox_of(self), attached_orders(scheduler_output)
        if mailbox is not None:
            check_memory(self.kv_cache_config)
            if orders is not None:
                mailbox.deliver(self.kv_caches, self.kv_cache_config.num_blocks, orders)
        return original(self, scheduler_output)

    return take_orders


def _scores_prompts(original: Function) -> Function:
    @functools.wraps(original)
    def score(*args: Any, **named: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.models.prompt_scores import scoring_prompts

        with scoring_prompts():
            return original(*args, **named)

    return score


WORKERS = (
    Replacement(
        module="vllm.v1.worker.gpu_worker",
        name="warmup_kernels",
        reason=(
            "its prompts are so short that layers treat them as decode, so the first long prompt "
            "would have to compile kernels"
        ),
        parameters=("model_runner", "worker_execute_model", "worker_sample_tokens"),
        make=_warmup_kernels,
    ),
    Replacement(
        module="vllm.v1.worker.gpu_worker",
        name="Worker.get_kv_cache_spec",
        reason=(
            "tells the planner the caches of layers, but neither which kernels read them nor what "
            "a vision encoder makes"
        ),
        parameters=("self",),
        make=_get_kv_cache_spec,
    ),
    Replacement(
        module="vllm.v1.worker.gpu_worker",
        name="Worker.initialize_from_config",
        reason=(
            "allocates the arena, in addition to which host memory is needed (vLLM's belongs to a "
            "KV connector); after it, trials of kernels can run on the caches of layers"
        ),
        parameters=("self", "kv_cache_config"),
        make=_initialize_from_config,
    ),
    *(
        Replacement(
            module=module,
            name="allocate_kv_cache",
            reason="allocates a buffer of its own; engines that share an arena map one memory",
            parameters=("kv_cache_config", "device", "layout", "kernel_block_sizes"),
            make=_allocate_kv_cache,
        )
        for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils")
    ),
    *(
        Replacement(
            module=module,
            name=name,
            reason="asks for hundreds of large pages, but captured requests touch only one",
            parameters=(runner,),
            make=_init_minimal_kv_cache_for_profiling,
            series=("0.33",),
        )
        for module, name, runner in (
            (
                "vllm.v1.worker.gpu_model_runner",
                "GPUModelRunner._init_minimal_kv_cache_for_profiling",
                "self",
            ),
            (
                "vllm.v1.worker.gpu.cudagraph_utils",
                "_init_minimal_kv_cache_for_profiling",
                "runner",
            ),
        )
    ),
    Replacement(
        module="vllm.v1.worker.gpu_model_runner",
        name="GPUModelRunner._batch_mm_inputs_from_scheduler",
        reason=(
            "encodes in the order of the schedule, but cross attention stores in the order of the "
            "batch, so that a resumed request gets the audio of a new one; vLLM's other runner "
            "sorts the inputs"
        ),
        parameters=("self", "scheduler_output"),
        make=_batch_mm_inputs_from_scheduler,
    ),
    Replacement(
        module="vllm.v1.worker.gpu_model_runner",
        name="GPUModelRunner._execute_mm_encoder",
        reason=(
            "keeps what it encodes as embeddings of tokens; layers of cross attention to images "
            "store keys and values of it before they run"
        ),
        parameters=("self", "scheduler_output"),
        make=_execute_mm_encoder,
    ),
    *(
        Replacement(
            module=module,
            name=name,
            reason=(
                "looks up all tokens of a prompt in its logits, but Llama 3.2 Vision has no logit "
                "for the token of an image"
            ),
            parameters=("self", *inputs),
            make=_scores_prompts,
        )
        for module, name, inputs in (
            (
                "vllm.v1.worker.gpu_model_runner",
                "GPUModelRunner._get_prompt_logprobs_dict",
                ("hidden_states", "num_scheduled_tokens"),
            ),
            (
                "vllm.v1.worker.gpu.sample.prompt_logprob",
                "PromptLogprobsWorker.compute_prompt_logprobs",
                (
                    "logits_fn",
                    "hidden_states",
                    "input_batch",
                    "all_token_ids",
                    "num_computed_tokens",
                    "prompt_lens",
                ),
            ),
        )
    ),
    Replacement(
        module="vllm.v1.worker.gpu_model_runner",
        name="GPUModelRunner._determine_batch_execution_and_padding",
        reason=(
            "chooses CUDA graphs of decoding requests by the number of tokens alone, even if a "
            "prompt begins with that many tokens or reads an image; vLLM's other runner checks this"
        ),
        parameters=(
            "self",
            "num_tokens",
            "num_reqs",
            "num_scheduled_tokens_np",
            "max_num_scheduled_tokens",
            "use_cascade_attn",
            "allow_microbatching",
            "force_eager",
            "force_uniform_decode",
            "force_has_lora",
            "force_num_active_loras",
            "num_encoder_reqs",
        ),
        make=_determine_batch_execution_and_padding,
    ),
    Replacement(
        module="vllm.v1.worker.gpu.model_states.encoder_decoder",
        name="EncoderDecoderModelState.prepare_inputs_embeds",
        reason="knows which requests it encodes for, but does not tell cross attention",
        parameters=("self", "scheduled_encoder_inputs", "input_batch", "req_states"),
        make=_prepare_inputs_embeds,
    ),
    Replacement(
        module="vllm.model_executor.layers.attention.attention",
        name="Attention.__init__",
        reason=(
            "MiMo-V2 asks by name for a backend in which keys and values have different widths; "
            "ours supports them too; and layers with a token budget need a backend of their own"
        ),
        parameters=(
            "self",
            "num_heads",
            "head_size",
            "scale",
            "num_kv_heads",
            "alibi_slopes",
            "use_alibi_sqrt",
            "cache_config",
            "quant_config",
            "logits_soft_cap",
            "per_layer_sliding_window",
            "prefix",
            "attn_type",
            "kv_sharing_target_layer_name",
            "mm_prefix_clamp_sliding_window",
            "attn_backend",
            "head_size_v",
            "extra_impl_args",
        ),
        make=_attention_init,
    ),
    Replacement(
        module="vllm.model_executor.layers.attention.attention",
        name="Attention.get_kv_cache_spec",
        reason="knows no layers that shrink a prompt to a token budget",
        parameters=("self", "vllm_config"),
        make=_attention_spec,
    ),
    Replacement(
        module="vllm.model_executor.layers.attention.cross_attention",
        name="create_cross_attention_backend",
        reason="stores for every request that begins, even over cached pages that others read",
        parameters=("underlying_attn_backend",),
        make=_create_cross_attention_backend,
    ),
    Replacement(
        module="vllm.model_executor.layers.attention.chunked_local_attention",
        name="create_chunked_local_attention_backend",
        reason="cuts requests into one per chunk on the host; our kernels mask chunks themselves",
        parameters=("underlying_attn_backend", "attention_chunk_size"),
        make=_create_chunked_local_attention_backend,
    ),
    *(
        Replacement(
            module=module,
            name=f"GPUModelRunner.{name}",
            reason=(
                "a step's orders arrive here, before its metadata is built; vLLM copies only a "
                "block id in every group"
            ),
            parameters=("self", "scheduler_output"),
            make=_takes_orders,
        )
        for module, name in (
            ("vllm.v1.worker.gpu_model_runner", "_update_states"),
            ("vllm.v1.worker.gpu.model_runner", "update_requests"),
        )
    ),
)
"""Replacements in vLLM's workers and attention layers."""
