"""A step's orders on their way from vLLM's scheduler to the mailbox of a model runner."""

import pickle
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm

UPDATES = ("GPUModelRunner._update_states", "GPUModelRunner.update_requests")
"""Functions of vLLM's two model runners that get a step before its metadata is built."""


def make_runner(layer_name):
    """A model runner with one metadata builder that takes checkpoints, and its mailbox."""
    from jenga.vllm_plugin.worker.step_mailbox import open_mailbox

    builder = SimpleNamespace(mailbox=None, ordered_layers=(layer_name,))
    runner = SimpleNamespace(
        attn_groups=[[SimpleNamespace(metadata_builders=[builder])]],
        kv_caches=[],
        kv_cache_config=SimpleNamespace(num_blocks=1),
    )
    return runner, builder, open_mailbox(runner)


def make_step(**orders):
    """A step as a worker in another process gets it."""
    from vllm.v1.core.sched.output import SchedulerOutput

    from jenga.vllm_plugin.orders.step_orders import StepOrders, attach_orders

    step = SchedulerOutput.make_empty()
    attach_orders(step, StepOrders(**orders))
    return pickle.loads(pickle.dumps(step))


@pytest.mark.parametrize("name", UPDATES)
def test_a_runner_puts_a_steps_orders_into_its_own_mailbox(name):
    from jenga.vllm_plugin.orders.step_orders import CheckpointWrite
    from jenga.vllm_plugin.patches.workers import WORKERS

    (update,) = (each for each in WORKERS if each.name == name)
    seen = []
    function = update.make(lambda _runner, step: seen.append(step))
    (first, builder, _), (_, other, _) = make_runner("layer"), make_runner("layer")
    write = CheckpointWrite(running_page=5, after_tokens=16, page=1)
    step = make_step(checkpoints={"layer": (write,), "of_another_rank": (write,)})

    function(first, step)

    assert seen == [step]
    assert step.kv_cache_block_copies is None
    assert other.mailbox.take_checkpoints(["layer"]) == ()
    assert builder.mailbox.take_checkpoints(["layer"]) == (write,)


@pytest.mark.parametrize("name", UPDATES)
def test_steps_without_orders_and_runners_without_a_mailbox_change_nothing(name):
    from vllm.v1.core.sched.output import SchedulerOutput

    from jenga.vllm_plugin.patches.workers import WORKERS

    (update,) = (each for each in WORKERS if each.name == name)
    seen = []
    function = update.make(lambda _runner, step: seen.append(step))
    runner, builder, mailbox = make_runner("layer")
    steps = [SchedulerOutput.make_empty() for _ in range(2)]

    function(runner, steps[0])
    function(SimpleNamespace(), steps[1])

    assert seen == steps
    assert builder.mailbox is mailbox
    assert mailbox.take_checkpoints(["layer"]) == ()


def test_a_warm_up_that_fails_is_over():
    _, builder, mailbox = make_runner("layer")

    def fail():
        assert builder.mailbox.is_warming_up
        msg = "a kernel does not compile"
        raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="does not compile"), mailbox.warming_up():
        fail()
    assert not mailbox.is_warming_up
