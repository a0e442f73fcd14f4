"""Fork a Python program whenever one is asked for, from a process that has imported its libraries.

`tests.warm` starts this file and says how it is asked. Neither vLLM nor a module of this repository
is imported here, so each program imports them anew, and finds its own `VLLM_` and `JENGA_`
variables. Usage: warm_process.py SOCKET, a descriptor of a Unix socket.
"""

import gc
import json
import os
import pickle
import runpy
import socket
import sys
import traceback
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

LIBRARIES = (
    "torch._inductor.lowering",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "openai.types.responses",
    "aiohttp",
    "fastapi",
    "xgrammar",
    "cv2",
)
"""The libraries of vLLM that take long to import. One that is not installed is left out."""

FRESH = ("vllm", "jenga", "jenga_kernels", "perf", "tests")
"""Packages that each program imports for itself."""

MAX_MESSAGE_BYTES = 1 << 20

REGISTRY = "vllm.model_executor.models.registry"
"""The module that inspects a model's class in a process of its own, which imports all of vLLM."""

HAS_GPU = Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()


def wait_for_program(asked):
    """Fork a child for each program that is asked for, one after the other.

    A request is JSON: `arguments` of a Python interpreter, `variables` to add, a `folder`. With it
    come descriptors for standard output and standard error. There are two answers: the id of the
    process when it begins, and its exit code when it has ended.

    Returns:
        The request, in the child that is to run it; None in this process, when the tests end.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, MAX_MESSAGE_BYTES, 2)
        if not message:
            return None
        process_id = os.fork()
        if process_id == 0:
            os.setsid()
            asked.close()
            for place, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, place)
                os.close(descriptor)
            return json.loads(message)
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(b"%d" % process_id)
        _, status = os.waitpid(process_id, 0)
        asked.send(b"%d" % os.waitstatus_to_exitcode(status))


def call_in_fork(function):
    """Call a function in a fork of this process, and get its result.

    Raises:
        RuntimeError: The function failed; the text has its traceback.
    """
    reading, writing = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        try:
            answer = True, function()
        except BaseException:
            answer = False, traceback.format_exc()
        os.close(reading)
        with os.fdopen(writing, "wb") as file:
            pickle.dump(answer, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    os.waitpid(process_id, 0)
    is_result, result = pickle.loads(answer)
    if not is_result:
        message = f"Error raised in subprocess:\n{result}"
        raise RuntimeError(message)
    return result


class InspectInFork(MetaPathFinder):
    """Has vLLM inspect a class in a fork, which has vLLM imported, when its registry is loaded.

    It does so once for each class on a new machine, and keeps what it finds in its cache.
    """

    def find_spec(self, fullname, path, target=None):  # noqa: ARG002
        if fullname != REGISTRY:
            return None
        spec = PathFinder.find_spec(fullname, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module._run_in_subprocess = call_in_fork

        spec.loader.exec_module = exec_module
        return spec


def run_program(arguments):
    """Run what a Python interpreter runs with these arguments: a file, `-m MODULE` or `-c CODE`."""
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main_module = ModuleType("__main__")
    if first == "-c":
        code, *rest = rest
        program = compile(code, "<string>", "exec")
        sys.path.insert(0, "")
    else:
        file = Path(first).resolve()
        program = compile(file.read_bytes(), file, "exec")
        sys.path.insert(0, str(file.parent))
        main_module.__file__ = str(file)
    sys.argv = [first, *rest]
    sys.modules["__main__"] = main_module
    exec(program, vars(main_module))


def main():
    asked = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]  # the folder of this file
    # vLLM sets it for itself before it imports the compiler.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for name in LIBRARIES:
        try:
            import_module(name)
        except ModuleNotFoundError:
            continue
    imported = [name for name in sys.modules if name.partition(".")[0] in FRESH]
    if imported:
        message = f"programs are to import these for themselves: {', '.join(imported)}"
        raise ImportError(message)
    gc.freeze()
    program = wait_for_program(asked)
    if program is not None:
        if not HAS_GPU:  # a fork cannot use one that its parent has used
            sys.meta_path.insert(0, InspectInFork())
        os.environ.update(program["variables"])
        os.chdir(program["folder"])
        run_program(program["arguments"])


if __name__ == "__main__":
    main()
