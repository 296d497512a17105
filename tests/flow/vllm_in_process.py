"""One vLLM in one process, run by .venv-vllm's python: `vllm_in_process.py MODEL SOCKET`; prints one JSON document.

Both sides of the connector stand in this process, so its scheduler's block pool can be looked at.
"""

import json
import os
import random
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.waiting import wait_until

BLOCK = 32
Foreign = Any
# vLLM's types are not there to check.


def main() -> None:
    """Ask cold, stored, forgotten and preempted, and say what came."""
    model, socket = sys.argv[1:]
    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        kv_cache_memory_bytes=1 << 20,
        block_size=BLOCK,
        max_model_len=1024,
        enforce_eager=True,
        max_num_seqs=16,
        kv_transfer_config={
            "kv_connector": "KvbusConnector",
            "kv_connector_module_path": "kvbus.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            # What is shown here is not how fast a busy machine answers.
            "kv_connector_extra_config": {"socket": socket, "lookup_budget_s": 30},
        },
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    side = scheduler.connector._scheduling
    mover = get_kv_transfer_group()._working.mover
    wait_until(lambda: mover.session is not None and scheduler.connector._lookups.is_near, 60)
    found: dict[str, object] = {"free_at_start": free()}
    ids = prompt("first", 10 * BLOCK + 5)
    found["cold"] = answers(llm, [ids])
    settle(llm)
    scheduler.reset_prefix_cache()
    found["loaded"] = answers(llm, [ids])
    found["loads"] = side.counts["loads"]
    # 16 prompts of 7 blocks and 100 tokens each do not fit into 64 blocks: some are preempted.
    many = [prompt(f"many {row}", 3 * BLOCK + row) for row in range(16)]
    alone = [answers(llm, [one], 100)[0] for one in many]
    settle(llm)
    scheduler.reset_prefix_cache(reset_connector=True)
    wanted = [scheduler.has_requests()]
    llm.llm_engine.step()
    found["steps_to_forget"] = [*wanted, scheduler.has_requests()]
    wait_until(lambda: mover._forgets_heard == 1)
    preempted = count_preemptions(scheduler)
    found["same"] = answers(llm, many, 100) == alone
    found["preempted"] = len(preempted)
    found["counts"] = dict(side.counts)
    settle(llm)
    found["free_at_end"] = free()
    found["idle_at_end"] = side.is_idle
    sys.stdout.write("FOUND " + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # its threads are daemons, and vLLM's own end takes seconds


def settle(llm: LLM) -> None:
    """Step until nothing is held any more for what is copied out."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler

    def is_idle() -> bool:
        llm.llm_engine.step()
        return scheduler.connector._scheduling.is_idle and not scheduler.has_requests()

    wait_until(is_idle, 60)


def answers(llm: LLM, prompts: list[list[int]], tokens: int = 8) -> list[list[int]]:
    """Greedy answers to prompts of token ids."""
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    given = llm.generate(asked, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False))
    return [list(one.outputs[0].token_ids) for one in given]


def prompt(name: str, length: int) -> list[int]:
    """Token ids that no other name shares."""
    pick = random.Random(name)
    return [pick.randrange(3, 512) for _ in range(length)]


def count_preemptions(scheduler: Foreign) -> list[str]:
    """A list that gets the id of each request that is preempted from here on."""
    preempted: list[str] = []
    real = scheduler._preempt_request

    def noting(request: Foreign, *rest: object, **more: object) -> object:
        preempted.append(request.request_id)
        return real(request, *rest, **more)

    scheduler._preempt_request = noting
    return preempted


if __name__ == "__main__":
    main()
