"""Machines that are not here: GPUs, drivers and packages made up for `jenga doctor`."""

import json
import os
import stat
import subprocess
import textwrap
import venv
from dataclasses import dataclass, field
from pathlib import Path

from jenga.vllm_plugin.trials import kept_trials

ROOT = Path(__file__).parents[2]

FINE, NOTE, REFUSED = "fine", "note", "refused"

H100 = "0, NVIDIA H100 80GB HBM3, 81559, 580.65.06, 9.0"
OLD_DRIVER = "0, NVIDIA H100 80GB HBM3, 81559, 470.82.01, 9.0"
A100 = "{}, NVIDIA A100-SXM4-80GB, 81920, 580.65.06, 8.0"
T4 = "0, Tesla T4, 15360, 580.65.06, 7.5"


@dataclass
class FakedMachine:
    """A Python that sees the packages of its own folder alone, and a program `nvidia-smi`.

    Attributes:
        folder: Holds all of it.
        python: Without any package.
        variables: Set besides.
    """

    folder: Path
    python: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def cache(self):
        return self.folder / "cache"

    @property
    def sources(self):
        """Our packages alone, without metadata that an installation may have left beside them."""
        folder = self.folder / "sources"
        if not folder.exists():
            folder.mkdir()
            for name in ("jenga", "jenga_kernels"):
                (folder / name).symlink_to(ROOT / name)
        return folder

    def has_gpus(self, *lines):
        self.has_program("nvidia-smi", "\n".join(["cat <<'END'", *lines, "END"]))

    def has_program(self, name, commands):
        file = self.folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{commands}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def has_jenga(self, version="0.1.0"):
        self.has_module(
            f"jenga_kv-{version}.dist-info/METADATA", f"Name: jenga-kv\nVersion: {version}\n"
        )
        entry = "[vllm.general_plugins]\njenga = jenga.vllm_plugin:register\n"
        self.has_module(f"jenga_kv-{version}.dist-info/entry_points.txt", entry)

    def has_torch(self, version="2.13.0", *, cuda="12.9", hip=None, gpus=1, warning=""):
        self.has_module(
            "torch/version.py",
            f"from typing import Optional\n__version__ = {version!r}\n"
            f"cuda: Optional[str] = {cuda!r}\nhip: Optional[str] = {hip!r}\n",
        )
        self.has_module(
            "torch/__init__.py",
            f"""
            import sys, warnings
            print("torch says hello")
            print("torch complains", file=sys.stderr)
            class cuda:
                @staticmethod
                def is_available():
                    if {warning!r}:
                        warnings.warn({warning!r})
                    return {gpus} > 0
                @staticmethod
                def device_count():
                    return {gpus}
            """,
        )

    def has_triton(self, version="3.6.0"):
        self.has_module("triton/__init__.py", f"__version__ = {version!r}\n")

    def has_vllm(self, version="0.32.0", source=""):
        self.has_module("vllm/_version.py", f"__version__ = version = {version!r}\n")
        self.has_module("vllm/__init__.py", source)

    def has_everything(self):
        self.has_jenga()
        self.has_torch()
        self.has_triton()
        self.has_vllm()

    def has_module(self, name, source):
        file = self.folder / "packages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))

    def doctor(self, *arguments):
        """Run `jenga doctor` there; get its exit code, output and errors."""
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JENGA_", "VLLM_", "TRITON_", "CUDA_"))
        }
        environ |= {
            "PATH": os.pathsep.join([str(self.folder / "bin"), "/usr/bin", "/bin"]),
            "PYTHONPATH": os.pathsep.join([str(self.folder / "packages"), str(self.sources)]),
            "JENGA_CACHE": str(self.cache),
            **self.variables,
        }
        done = subprocess.run(
            [str(self.python), "-P", "-m", "jenga", "doctor", *arguments],
            env=environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def findings(self, *arguments):
        """Run `jenga doctor --json`; get its exit code and its findings by subject."""
        code, output, errors = self.doctor("--json", *arguments)
        assert errors == ""
        report = json.loads(output)
        return code, {each["subject"]: each for each in report["findings"]}


def llama_folder(folder, **fields):
    """Make a folder with the configuration of a small Llama."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "vocab_size": 512,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def make_python(folder):
    """Make a Python that sees no package, and get its path."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def refused(findings):
    return sorted(subject for subject, each in findings.items() if each["status"] == REFUSED)


def keep(machine, monkeypatch, key, *, gpu="NVIDIA H100 80GB HBM3", triton="3.6.0", **verdict):
    """Keep a verdict as an engine on that machine would."""
    monkeypatch.setenv("JENGA_CACHE", str(machine.cache))
    folder = kept_trials.trials_folder(gpu, triton)
    folder.mkdir(parents=True, exist_ok=True)
    said = {"operation": "state_scan", "is_passed": True, "is_final": True, "reason": ""}
    (folder / f"{key}.json").write_text(json.dumps({"verdict": said | verdict, "start": "x"}))
    return folder
