"""lm-eval's tasks with a model of ours: the numbers of lm-eval's own transformers backend, on every mesh, offline."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from titanlike.checkpoint.hf_tokenizer import byte_tokenizer_files
from titanlike.errors import UserError
from titanlike.evaluate import main

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install -e '.[eval]')")
pytest.importorskip("accelerate", reason="lm-eval's own backend needs accelerate (pip install accelerate)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[test]')")

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs: {until: ["e", "Z"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}
SIZES: dict[str, Any] = {
    **{"vocab_size": 257, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 64},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 256, "eos_token_id": 256},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of transformers, and three tasks with ten documents."""
    folder = tmp_path_factory.mktemp("lm-eval")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.25)
    model.save_pretrained(folder / "model")
    for name, content in byte_tokenizer_files().items():
        (folder / "model" / name).write_bytes(content)
    documents = [
        {
            "question": f"What is {n} and {n}? " + "It is said to be " * (n % 5),  # some are longer than the context
            "choices": [f" {n + k}" + " more or less" * k for k in range(3)],
            "answer": n % 3,
            "written": "x",
            "text": f"Number {n} is one of many, naïve ✓. " * (1 + n % 4),
        }
        for n in range(10)
    ]
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    for name, content in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tasks / 'documents.jsonl'}}}}}\n"
        (tasks / f"{name}.yaml").write_text(f"task: {name}\ntest_split: test\n{data}{content}")
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def _argv(folder: Path, *more: str) -> list[str]:
    tasks = ["--tasks", ",".join(TASKS), "--include-path", str(folder / "tasks"), "--batch-size", "4"]
    return ["--checkpoint", str(folder / "model"), *tasks, "--train.dtype", "float32", "--json", *more]


def _evaluated(lines: list[list[str]]) -> list[Any]:
    answers = []
    for argv in lines:
        out = io.StringIO()
        try:
            main(argv, out)
            answers.append(json.loads(out.getvalue())["tasks"] if out.getvalue() else None)
        except UserError as error:
            answers.append(str(error))
    return answers


def _theirs(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """(metrics, the texts that it wrote) of lm-eval's own backend."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    lm = HFLM(pretrained=str(folder / "model"), device="cpu", dtype="float32", batch_size=4)
    found = simple_evaluate(model=lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    texts = [sample["filtered_resps"][0] for sample in found["samples"]["writing"]]
    return found["results"], texts


def _our_texts(folder: Path) -> list[str]:
    from lm_eval.api.instance import Instance

    from titanlike.generate.source import open_source, tokenizer_for
    from titanlike.lm_eval_tasks import MeshLM
    from titanlike.mesh import Mesh

    source = open_source(folder / "model")
    lm = MeshLM(source, Mesh(1, 1, 1, torch.device("cpu")), torch.float32, tokenizer_for(source), 4)
    documents = [json.loads(line) for line in (folder / "tasks" / "documents.jsonl").read_text().splitlines()]
    settings = {"until": ["e", "Z"], "max_gen_toks": 12, "do_sample": False}
    requests = [
        Instance(request_type="generate_until", doc=each, arguments=(each["question"], settings), idx=i)
        for i, each in enumerate(documents)
    ]
    return lm.generate_until(requests)


def test_numbers_and_texts_are_those_of_the_transformers_backend(folder: Path) -> None:
    theirs, texts = _theirs(folder)
    ours = run_ranks(1, _evaluated, [_argv(folder)])[0][0]
    compared = 0
    for task in TASKS:
        for name, value in ours[task].items():
            assert value == pytest.approx(theirs[task][f"{name},none"], rel=1e-5), (task, name)
            compared += 1
    assert compared >= 5
    assert 0 < ours["choice"]["acc"] < 1
    mine = run_ranks(1, _our_texts, folder)[0]
    # lm-eval strips nothing from what was written but the stop string; its filter takes the first answer.
    assert [text.strip() for text in mine] == [text.strip() for text in texts]
    assert len(set(mine)) > 5 and any("e" not in text for text in mine)
    meshes = [_argv(folder, f"--mesh.{axis}", "2") for axis in ("tp", "pp", "dp")]
    first, second = run_ranks(2, _evaluated, meshes)
    assert second == [None] * 3
    for answer in first:
        for task in TASKS:
            assert answer[task] == pytest.approx(ours[task], rel=1e-5)


@pytest.mark.slow  # lm-eval reads thousands of definitions to know
def test_a_task_that_is_not_known_is_named(folder: Path) -> None:
    argv = _argv(folder)
    argv[argv.index("--tasks") + 1] = "choise"
    said = run_ranks(1, _evaluated, [argv])[0][0]
    assert said.startswith("--tasks: lm-eval knows no task 'choise': the nearest is")
