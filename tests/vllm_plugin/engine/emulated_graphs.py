"""CUDA graphs of vLLM's second model runner on a CPU: a replay makes the captured call again.

What a graph holds is what its call was given when it was captured: tensors, whose bytes later steps
change in place, and numbers, which stay as they were. A call made again with the same arguments
reads the same, so a step whose tensors are elsewhere, or whose numbers differ, goes as wrong as on
a GPU. What is not seen: work that a capture cannot hold at all, such as waiting for the device.
"""

import contextlib
from types import SimpleNamespace

import torch


class _Graph:
    """One graph: the call it was captured from."""

    def __init__(self):
        self.call = None

    def replay(self):
        self.call()


class _Capture:
    """Which graph is being captured."""

    def __init__(self):
        self.graph = None

    @contextlib.contextmanager
    def capturing(self, graph, *_pool, **_stream):
        self.graph = graph
        try:
            yield
        finally:
            self.graph = None

    def recording(self, call):
        """Wrap a call so that the graph being captured keeps it."""

        def recorded(*args):
            if self.graph is not None:
                self.graph.call = lambda: call(*args)
            return call(*args)

        return recorded


@contextlib.contextmanager
def _nothing(*_args, **_options):
    yield None


def _keep_defaults(platform):
    """Let the CPU's platform take what a GPU's does by default: graphs, and steps run ahead."""
    check = platform.check_and_update_config

    def check_and_update_config(_cls, vllm_config):
        compilation = vllm_config.compilation_config
        sizes = list(compilation.cudagraph_capture_sizes or [])
        runs_ahead = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = runs_ahead
        compilation.cudagraph_capture_sizes = sizes
        compilation.max_cudagraph_capture_size = max(sizes, default=0)

    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.support_static_graph_mode = classmethod(lambda _cls: True)
    platform.get_global_graph_pool = platform.graph_pool_handle = lambda _self: (0, 0)


def _profile_graphs(worker_class):
    """Let a worker measure what graphs take, over a cache as small as can be, before the real one.

    What comes out is left alone: on a CPU it means nothing.
    """
    from vllm.v1.worker.workspace import init_workspace_manager

    original = worker_class.determine_available_memory

    def determine_available_memory(self):
        init_workspace_manager(torch.device("cpu"))
        self.model_runner.profile_cudagraph_memory()
        return original(self)

    worker_class.determine_available_memory = determine_available_memory


def emulate_graphs():
    """Let the second model runner capture and replay on a CPU; before an engine is made."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  first, because it too replaces names of torch.cuda
    from vllm import SamplingParams
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu import cudagraph_utils

    _keep_defaults(type(current_platform))
    _profile_graphs(CPUWorker)
    # vLLM's kernels for other ways to sample do not run in the interpreter.
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    SamplingParams.for_sampler_warmup = staticmethod(lambda: greedy)
    capture = _Capture()
    torch.cuda.CUDAGraph = _Graph
    torch.cuda.graph = capture.capturing
    cudagraph_utils.graph_capture = cudagraph_utils.capture_pool = _nothing
    cudagraph_utils.current_stream = SimpleNamespace
    original = cudagraph_utils.CudaGraphManager.capture

    def capture_all(self, create_forward_fn, *args, **kwargs):
        def create(*desc, **options):
            return capture.recording(create_forward_fn(*desc, **options))

        return original(self, create, *args, **kwargs)

    cudagraph_utils.CudaGraphManager.capture = capture_all


def start_as_on_a_gpu(llm):
    """Warm kernels up and capture graphs, as a worker on a GPU does before it serves.

    Returns:
        Tokens of the steps that warmed up.
    """
    from vllm.v1.worker import gpu_worker

    worker = llm.llm_engine.model_executor.driver_worker.worker
    num_tokens = []

    def execute_model(step):
        num_tokens.append(step.total_num_scheduled_tokens)
        return worker.execute_model(step)

    if worker.vllm_config.kernel_config.enable_jit_warmup:
        gpu_worker.warmup_kernels(worker.model_runner, execute_model, worker.sample_tokens)
    worker.model_runner.capture_model()
    return num_tokens
