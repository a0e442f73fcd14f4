"""Programs that begin with libraries imported are otherwise as a process started for them."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import ENVIRONMENT

TOLD = """
import json, os, sys
told = {
    "arguments": sys.argv,
    "folder": os.getcwd(),
    "variables": {name: os.environ.get(name) for name in ("JENGA_TOLD", "VLLM_TOLD", "TOLD")},
    "fresh": [each for each in sys.modules if each.partition(".")[0] in ("vllm", "jenga", "perf")],
    "is_warm": "torch._inductor.lowering" in sys.modules,
    "name": __name__,
    "main_names": sorted(vars(sys.modules["__main__"]).keys() & {"os", "LIBRARIES"}),
    "input": sys.stdin.read(),
}
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def environment():
    return ENVIRONMENT | {"TOLD": "early"}


def told_by(arguments, environment, folder, **options):
    ended = warm.run(arguments, environment, folder=folder, **options)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def is_running(process_id):
    """Whether a process runs. One that was killed is there until its parent has waited for it."""
    with suppress(FileNotFoundError):
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        return fields[0] != "Z"
    return False


@pytest.mark.parametrize("way", ["-c", "-m", "file"])
def test_a_program_gets_its_arguments_folder_and_variables(way, environment, tmp_path):
    (tmp_path / "told.py").write_text(TOLD)
    arguments = {"-c": ["-c", TOLD], "-m": ["-m", "told"], "file": [tmp_path / "told.py"]}[way]
    beyond = {"-c": "-c"}.get(way, str(tmp_path / "told.py"))
    variables = {"JENGA_TOLD": way, "VLLM_TOLD": "1"}

    told = told_by([*arguments, "first", "--second"], environment | variables, tmp_path)
    later = told_by(arguments, environment, tmp_path)

    assert told["arguments"] == [beyond, "first", "--second"]
    assert told["folder"] == str(tmp_path)
    assert told["variables"] == variables | {"TOLD": "early"}
    assert later["variables"] == {"JENGA_TOLD": None, "VLLM_TOLD": None, "TOLD": "early"}
    assert told["name"] == "__main__"
    assert told["main_names"] == ["os"]
    assert told["input"] == ""


def test_a_program_imports_vllm_and_the_plugin_for_itself(environment, tmp_path):
    told = told_by(["-c", TOLD], environment, tmp_path)

    assert told["is_warm"]
    assert told["fresh"] == []


def test_programs_do_not_see_each_other(environment, tmp_path):
    code = "import torch; print(hasattr(torch, 'mark')); torch.mark = 1; torch.set_num_threads(1)"

    first, second = (warm.run(["-c", code], environment, folder=tmp_path) for _ in range(2))

    assert first.stdout == second.stdout == "False\n"


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("assert False, 'this is why'", 1),
    ],
    ids=["exit", "killed", "error"],
)
def test_the_end_of_a_program_is_told(code, returncode, environment, tmp_path):
    ended = warm.run(["-c", f"print('begun', flush=True); {code}"], environment, folder=tmp_path)

    assert ended.returncode == returncode
    assert ended.stdout == "begun\n"
    assert ("this is why" in ended.stderr) == (returncode == 1)


def test_functions_to_call_at_the_end_are_called_and_both_outputs_may_be_one(environment, tmp_path):
    code = (
        "import atexit, sys; atexit.register(print, 'third')\n"
        "print('first', flush=True); print('second', file=sys.stderr, flush=True)"
    )

    ended = warm.run(["-c", code], environment, folder=tmp_path, merges=True)

    assert ended == warm.Ended(0, "first\nsecond\nthird\n", "")


def test_children_that_a_program_leaves_are_killed(environment, tmp_path):
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'])\n"
        "print(child.pid)"
    )

    ended = warm.run(["-c", code], environment, folder=tmp_path)

    while is_running(int(ended.stdout)):
        time.sleep(0.01)


def test_workers_that_are_spawned_find_the_programs_functions(environment, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing\n"
        "def double(number):\n"
        "    return 2 * number\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(double, (21,)))\n"
    )

    ended = warm.run([program], environment, folder=tmp_path)

    assert ended.stdout == "42\n", ended.stderr


def test_a_process_that_cannot_import_says_so_and_the_next_program_runs(environment, tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('a broken library')")
    broken = environment | {"PYTHONPATH": str(tmp_path)}

    with pytest.raises(RuntimeError, match=r"warm_process.py ended with 1; its output says why"):
        warm.run(["-c", "print(1)"], broken, folder=tmp_path)

    assert warm.run(["-c", "print(1)"], environment, folder=tmp_path).stdout == "1\n"


def test_the_process_ends_with_the_tests():
    code = (
        "import os\n"
        "from tests import warm\n"
        "print(warm.run(['-c', 'import os; print(os.getppid())'], dict(os.environ)).stdout)\n"
    )
    root = Path(__file__).parents[1]

    tests = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )

    assert not is_running(int(tests.stdout))


INSPECT = """
import sys
from vllm.model_executor.models import registry
model = registry.ModelRegistry.models["{}"]
if "{}":
    model = registry._LazyRegisteredModel(module_name="{}", class_name="Missing")
print(model.inspect_model_cls().is_text_generation_model)
print(model.module_name in sys.modules)
"""


def test_a_class_is_inspected_without_being_imported_by_the_program(environment, tmp_path):
    pytest.importorskip("vllm", reason="the engine is not installed")
    code = INSPECT.format("OPTForCausalLM", "", "")
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}

    ended = warm.run(["-c", code], environment | cache, folder=tmp_path)

    assert ended.stdout == "True\nFalse\n", ended.stderr
    assert [each.name for each in (tmp_path / "cache" / "modelinfos").iterdir()] == [
        "vllm-model_executor-models-opt-OPTForCausalLM.json"
    ]


def test_what_fails_as_a_class_is_inspected_is_told(environment, tmp_path):
    pytest.importorskip("vllm", reason="the engine is not installed")
    code = INSPECT.format("OPTForCausalLM", "missing", "missing")

    ended = warm.run(["-c", code], environment, folder=tmp_path)

    assert ended.returncode == 1
    assert "Error raised in subprocess" in ended.stderr
    assert "No module named 'missing'" in ended.stderr
