"""An arena on a GPU, with a CUDA driver that has none: its holder, its handle, kills of anyone."""

import json
import os
import signal

import pytest

from jenga.broker.client import check_join
from jenga.broker.cuda import CudaError, Gpu
from jenga.broker.folder import ArenaFolder
from jenga.broker.memory import DeviceMemory, MemoryLostError
from jenga.broker.processes import process_of
from jenga.cli import main
from tests.broker import fake_cuda
from tests.broker.fake_engine_process import GEOMETRY
from tests.broker.test_processes import NUM_PAGES, Shared, until

PAGE_BYTES = GEOMETRY.large_page_bytes
SIZES = ["--large-page-bytes", str(PAGE_BYTES), "--bytes", str(NUM_PAGES * PAGE_BYTES)]


@pytest.fixture
def gpu_folder(tmp_path, monkeypatch):
    """Where the memory of the GPU is."""
    return fake_cuda.install(tmp_path, monkeypatch)


class SharedGpu(Shared):
    """An arena on a GPU, its broker, and engines."""

    def start_broker(self, *options):
        super().start_broker(*options, "--device", "cuda:0")


@pytest.fixture
def shared(tmp_path, gpu_folder):  # noqa: ARG001  it sets the driver
    shared = SharedGpu(tmp_path / "arena")
    memory = shared.folder.memory
    yield shared
    for engine in shared.engines:
        if engine.process.poll() is None:
            engine.kill()
    if shared.broker.poll() is None:
        shared.kill_broker()
    memory.remove()


@pytest.fixture
def folder(tmp_path, gpu_folder):  # noqa: ARG001  it sets the driver
    """An arena on a GPU without a broker."""
    folder = ArenaFolder(tmp_path / "arena")
    folder.create(large_page_bytes=PAGE_BYTES, num_pages=NUM_PAGES, device="cuda:0")
    memory = folder.memory
    yield folder
    memory.remove()


@pytest.fixture
def command(capfd):
    """`jenga broker` in this process. It returns its status and its output."""

    def run(*arguments):
        capfd.readouterr()
        try:
            code = main(["broker", *map(str, arguments)])
        except SystemExit as ended:  # of the parser
            code = ended.code
        return code, "".join(capfd.readouterr())

    return run


def test_engines_share_memory_of_a_gpu_while_engines_and_brokers_are_killed(
    shared, gpu_folder, command
):
    holder = shared.folder.memory.holder
    assert os.getsid(holder.pid) == holder.pid  # not of the terminal that may end the broker
    first = shared.engine("first", 10).wait_ready()
    second = shared.engine("second", 10).wait_ready()
    first.load(20)
    second.load(20)
    until(lambda: first.report()["finished"] > 20 and second.report()["finished"] > 20)
    (content,) = gpu_folder.iterdir()
    # Each engine writes its number to its large pages, and checks that nobody else has.
    stamps = set(content.read_bytes()[PAGE_BYTES : NUM_PAGES * PAGE_BYTES : PAGE_BYTES])
    assert {1, 2} <= stamps <= {0, 1, 2}

    first.kill()
    until(lambda: "first" not in shared.held()[0])
    shared.kill_broker()
    until(lambda: not second.report()["connected"])
    assert holder.is_alive
    shared.start_broker()
    third = shared.engine("third", 10).wait_ready()
    third.load(20)
    until(lambda: second.report()["connected"] and third.report()["finished"] > 20)
    assert shared.folder.memory.holder == holder

    shared.broker.send_signal(signal.SIGTERM)
    shared.broker.communicate()
    assert "uses this arena" in command("remove", shared.folder.path)[1]
    assert holder.is_alive
    second.kill()
    third.kill()
    assert command("remove", shared.folder.path) == (0, "")
    assert not holder.is_alive
    assert not shared.folder.path.exists()


def test_everybody_is_told_that_memory_is_lost_with_its_holder(shared, command, capfd):
    first = shared.engine("first", 10).wait_ready()
    first.load(20)
    until(lambda: first.report()["finished"] > 0)
    capfd.readouterr()
    holder = shared.folder.memory.holder
    os.kill(holder.pid, signal.SIGKILL)
    lost = f"process {holder.pid}, which held it on cuda:0, has ended"

    assert first.process.wait() != 0
    first.kill()  # closes its pipes
    assert f"MemoryLostError: the memory of the shared arena in {shared.folder.path} is lost" in (
        capfd.readouterr().err
    )
    second = shared.engine("second", 10)
    assert second.process.wait() != 0
    second.kill()
    assert lost in capfd.readouterr().err
    assert lost in command("status", shared.folder.path)[1]
    status = json.loads(command("status", shared.folder.path, "--json")[1])
    assert (status["device"], lost in status["lost"]) == ("cuda:0", True)
    shared.kill_broker()
    code, output = command("start", shared.folder.path)
    assert (code, lost in output) == (2, True)

    assert command("remove", shared.folder.path) == (0, "")
    assert not shared.folder.path.exists()


def test_a_broker_warns_and_says_where_its_arena_is(capfd, shared, command):
    assert "never run on a GPU" in capfd.readouterr().err
    options = {"guarantee_pages": 10, "limit_pages": 10, "large_page_bytes": PAGE_BYTES}
    check_join(shared.folder, "engine", **options)
    assert "bytes on cuda:0, 100 free" in command("status", shared.folder.path)[1]
    shared.kill_broker()
    for device in ("cpu", "cuda:1"):
        code, output = command("start", shared.folder.path, "--device", device)
        assert (code, "does not fit the arena that is there, on cuda:0" in output) == (2, True)


@pytest.mark.parametrize(
    ("device", "variables", "complaint"),
    [
        ("cuda", {"FAKE_CUDA_BYTES": "4096"}, "cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuda:7", {}, "cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE"),
        ("cuda", {"LD_LIBRARY_PATH": ""}, "the CUDA driver cannot be used: libcuda.so.1"),
        ("gpu", {}, "must be cpu, cuda or cuda:N, got 'gpu'"),
    ],
    ids=["memory", "gpu", "driver", "name"],
)
def test_memory_that_cannot_be_had_is_refused_by_name_and_nothing_is_left(
    tmp_path, gpu_folder, monkeypatch, command, device, variables, complaint
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "arena"
    code, output = command("start", path, *SIZES, "--device", device)

    assert (code, complaint in output) == (2, True), output
    assert not path.exists() or not list(path.iterdir())
    assert not list(gpu_folder.iterdir())


def test_a_holder_ends_if_the_books_cannot_be_made(tmp_path, gpu_folder):
    path = tmp_path / "arena"
    with pytest.raises(ValueError, match="num_pages must be at most"):
        ArenaFolder(path).create(large_page_bytes=1, num_pages=1 << 25, device="cuda:0")
    assert not list(path.iterdir())
    (content,) = gpu_folder.iterdir()
    pid = int(content.name.partition("-")[0])
    with pytest.raises(ProcessLookupError):
        process_of(pid)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_start_ends_the_holder_that_an_interrupted_start_has_left(folder, device):
    left = folder.memory
    folder.books.unlink()
    folder.create(large_page_bytes=PAGE_BYTES, num_pages=NUM_PAGES, device=device)

    assert not left.holder.is_alive
    assert folder.memory.device == device
    folder.remove()


def test_new_memory_is_zero_and_a_process_opens_its_handle_once(folder, gpu_folder):
    array = folder.memory.map(0)
    content = fake_cuda.bytes_of(array)
    assert array.num_bytes == NUM_PAGES * PAGE_BYTES
    assert not any(content)
    content[5] = 7
    assert folder.memory.map(0) == array
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_ALREADY_MAPPED"):
        Gpu(0).open(folder.memory.handle)
    (stored,) = gpu_folder.iterdir()
    assert stored.read_bytes()[:6] == b"\0\0\0\0\0\7"


def test_memory_of_another_gpu_is_refused_with_both_uuids(folder):
    with pytest.raises(ValueError, match=r"UUID a0a0a000a0.* uses the one with UUID a1a1a100a1"):
        folder.memory.map(1)


def test_a_handle_of_less_memory_than_said_is_refused(folder):
    fields = json.loads(folder.handle.read_text())
    fields["num_bytes"] = 4 << 20
    folder.handle.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="must open 4194304 bytes, but opens 2097152"):
        folder.memory.map(0)


def test_a_handle_of_a_process_that_ended_opens_nothing(folder):
    memory = folder.memory
    os.kill(memory.holder.pid, signal.SIGKILL)
    until(lambda: not memory.holder.is_alive)
    with pytest.raises(MemoryLostError, match="is lost"):
        memory.map(0)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        Gpu(0).open(memory.handle)


def test_a_holder_whose_process_id_is_used_again_is_not_signalled(folder):
    memory = folder.memory
    fields = json.loads(folder.handle.read_text())
    fields["holder"] = {"pid": os.getpid(), "start_ticks": 1}
    folder.handle.write_text(json.dumps(fields))

    folder.memory.remove()  # else this process would end
    assert not folder.handle.exists()
    assert memory.holder.is_alive


@pytest.mark.parametrize("text", ["", "{}", '{"device": "cuda:0"}', "[]"])
def test_a_damaged_description_is_refused_by_name(tmp_path, text):
    path = tmp_path / "handle"
    path.write_text(text)
    with pytest.raises(ValueError, match="handle does not describe memory of a GPU"):
        DeviceMemory.read(path)


def test_an_arena_may_be_longer_than_32_bits_can_count(tmp_path, gpu_folder):
    folder = ArenaFolder(tmp_path / "arena")
    num_pages = 1 + (5 << 30) // (1 << 20)
    folder.create(large_page_bytes=1 << 20, num_pages=num_pages, device="cuda:0")
    memory = folder.memory
    try:
        array = memory.map(0)
        assert array.__cuda_array_interface__["shape"] == ((5 << 30) + (1 << 20),)
        fake_cuda.bytes_of(array)[array.num_bytes - 1] = 9
        (stored,) = gpu_folder.iterdir()
        with stored.open("rb") as file:
            file.seek(array.num_bytes - 1)
            assert file.read(1) == b"\x09"
    finally:
        folder.remove()
    until(lambda: not memory.holder.is_alive)
