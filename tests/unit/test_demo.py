"""The demo's model, data and text, the command line, and the list of bars; no training run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit_compile import bars, cli
from lowbit_compile.commands import demo as demo_command
from lowbit_compile.demo import data, train
from lowbit_compile.demo.model import CPU_CONFIG, GPU_CONFIG, LanguageModel, ModelConfig, parameter_count
from lowbit_compile.errors import LowbitError
from lowbit_compile.formats import ALL_FORMATS
from lowbit_compile.policy_file import load_policy, preset_names

SMALL = ModelConfig(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, ffn=48, context=16)


def test_model_sizes() -> None:
    assert parameter_count(LanguageModel(CPU_CONFIG)) == 3_278_080
    with torch.device("meta"):
        assert round(parameter_count(LanguageModel(GPU_CONFIG)) / 1e6) == 82


def test_head_is_the_embedding() -> None:
    model = LanguageModel(SMALL)
    assert model.lm_head.weight is model.embed.weight


def test_logits_and_loss_agree() -> None:
    torch.manual_seed(0)
    model = LanguageModel(SMALL)
    tokens, targets = torch.randint(64, (2, 3, 16))
    logits = model(tokens)
    assert logits.shape == (3, 16, 64)
    expected = -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()
    torch.testing.assert_close(model(tokens, targets), expected)


def test_model_is_causal() -> None:
    torch.manual_seed(0)
    model = LanguageModel(SMALL)
    tokens = torch.randint(64, (1, 16))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 64
    torch.testing.assert_close(model(tokens)[:, :8], model(changed)[:, :8])
    assert not torch.allclose(model(tokens)[:, 8:], model(changed)[:, 8:])


def test_attention_sees_distance_only() -> None:
    """RoPE: scores of two positions depend on how far apart they are."""
    from lowbit_compile.demo.model import rope_tables, rotate

    cos, sin = rope_tables(SMALL)
    query, key = torch.randn(2, 1, 1, 1, SMALL.head_dim, generator=torch.Generator().manual_seed(0))

    def score(i: int, j: int) -> torch.Tensor:
        return (rotate(query, cos[i], sin[i]) * rotate(key, cos[j], sin[j])).sum()

    torch.testing.assert_close(score(3, 1), score(12, 10))
    assert not torch.isclose(score(3, 1), score(3, 2))


def test_batches_repeat_and_follow_the_seed() -> None:
    def drawn(seed: int) -> torch.Tensor:
        return torch.stack([t for t, _ in data.batches("val", steps=3, batch=2, context=32, seed=seed)])

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))


def test_targets_are_the_next_tokens() -> None:
    tokens, targets = next(data.batches("val", steps=1, batch=4, context=32))
    assert tokens.shape == targets.shape == (4, 32)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_train_and_val_share_no_document() -> None:
    assert not set(data.documents("train")) & set(data.documents("val"))


def test_tokens_cover_the_need_and_no_more() -> None:
    ids = data.token_ids("train", 50_000)
    assert 50_000 <= len(ids) < 100_000
    assert 0 <= int(ids.min()) <= int(ids.max()) < CPU_CONFIG.vocab


def test_spread_takes_every_part() -> None:
    docs = data.documents("train")
    places = [docs.index(d) / len(docs) for d in data.spread("train", 600_000)]
    assert all(any(part / 10 <= p < (part + 1) / 10 for p in places) for part in range(10))


def test_unknown_split() -> None:
    with pytest.raises(ValueError, match="'test'"):
        data.documents("test")


@pytest.mark.parametrize(
    ("device", "steps", "message"),
    [("quantum", None, "quantum"), ("meta", None, "meta"), ("cpu", 3, "more than 3"), ("cpu", -1, "more than 3")],
)
def test_setup_refuses(device: str, steps: int | None, message: str) -> None:
    with pytest.raises(LowbitError, match=message):
        train.setup_for(device, steps, 0)


def test_learning_rate_rises_then_falls() -> None:
    rates = [train._warm_cosine(step, 100) for step in range(100)]
    assert max(rates) == 1.0 == rates[10]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11


def test_misspelt_preset_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--policy", "fp8_rowise"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "did you mean 'fp8_rowwise'?" in err


def test_policy_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\nrules:\n  - {match: '*', use: mxfp8, reason: everywhere}\n")
    assert cli.main(["policy", "check", str(file)]) == 0
    out = capsys.readouterr().out
    assert "everywhere" in out
    assert load_policy(str(file)).id in out
    file.write_text("version: 1\nrulez: []\n")
    assert cli.main(["policy", "check", str(file)]) == 2
    err = capsys.readouterr().err
    assert "did you mean 'rules'?" in err
    assert "policy.yaml:2" in err


def test_presets_and_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    assert capsys.readouterr().out.split() == list(preset_names())
    assert cli.main(["formats"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(ALL_FORMATS)
    assert lines[0].split() == ["e4m3fn", "8", "448", "0.00195312", "yes", "256"]


def test_no_traceback_from_the_command() -> None:
    command = [sys.executable, "-m", "lowbit_compile.cli", "policy", "check", "nothing.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def _result(card: str, folder: str) -> dict[str, Any]:
    run = train.Run("x", [3.0, 2.0], 2.5, 1000.0, 700.0, 2, 1, 9.0, "In the year")
    linear = {"path": "blocks.0.attn.q_proj", "shape": [256, 256], "rule": "'*' -> mxfp8", "kind": "linear"}
    runs = {"bf16": vars(run), "lowbit": vars(run)}
    head = {"policy": "mxfp8", "steps": 2, "tokens_per_step": 8, "parameters": 1000, "seed": 0, "memory_is": "RSS"}
    tail = {"card": card, "loss_ratio": 1.0, "seconds": 20.0, "folder": folder}
    return head | tail | {"linears": [linear], "runs": runs}


def test_demo_text_and_files(tmp_path: Path) -> None:
    result = _result("cpu", str(tmp_path))
    text = demo_command.demo_text(result)
    for part in ("blocks.0.attn.q_proj", "256x256", "2.5000", "recompiles", "In the year", str(tmp_path)):
        assert part in text
    train._dump(tmp_path, result)
    assert (tmp_path / "loss.csv").read_text().splitlines() == ["step,bf16,lowbit", "1,3.0,3.0", "2,2.0,2.0"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "report.json").read_text()) == result


@pytest.mark.parametrize(
    ("card", "ids"),
    [
        ("cpu", ["demo.cpu.loss_ratio", "demo.cpu.recompiles", "demo.cpu.seconds"]),
        ("NVIDIA H200", ["demo.h200.loss_ratio"]),
    ],
)
def test_demo_records_bars(tmp_path: Path, card: str, ids: list[str]) -> None:
    file = tmp_path / "results" / "bars.json"
    demo_command._record(str(file), _result(card, "out"))
    written = json.loads(file.read_text())
    assert [entry["id"] for entry in written] == ids
    assert all(entry["card"] == card and entry["rows"] == "out/loss.csv" for entry in written)


def test_bars_replace_the_same_id_and_keep_others(tmp_path: Path) -> None:
    file = tmp_path / "bars.json"
    bars.record(file, bars.measured({"a": (1.0, "s"), "b": (2.0, "s")}, card="cpu", rows="x.csv"))
    bars.record(file, bars.measured({"b": (3.0, "s")}, card="cpu", rows="y.csv"))
    found = {entry["id"]: (entry["value"], entry["rows"]) for entry in json.loads(file.read_text())}
    assert found == {"a": (1.0, "x.csv"), "b": (3.0, "y.csv")}
    keys = {"id", "value", "unit", "card", "date", "command", "torch", "triton", "commit", "rows"}
    assert all(set(entry) == keys for entry in json.loads(file.read_text()))


@pytest.mark.parametrize("text", ["not json", "{}x", "[1]", '[{"value": 1}]'])
def test_bars_never_overwrite_another_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bars.json"
    file.write_text(text)
    with pytest.raises(LowbitError, match=r"bars\.json"):
        bars.record(file, [])
    assert file.read_text() == text


def test_a_short_demo_lists_every_linear_and_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, ffn=64, context=64)
    monkeypatch.setattr(train, "CPU_CONFIG", small)
    options = ["--device", "cpu", "--steps", "5", "--policy", "mxfp8", "--json", "--out", str(tmp_path)]
    assert cli.main(["demo", *options]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert "lowbit" in err
    assert "10/10" in err  # the progress bar
    paths = {record["path"] for record in result["linears"]}
    names = [f"attn.{n}_proj" for n in "qkvo"] + [f"ffn.{n}_proj" for n in ("gate", "up", "down")]
    assert paths == {f"blocks.0.{name}" for name in names} | {"lm_head"}
    assert all(record["reason"] or record["fprop"] == "e4m3fn x e4m3fn" for record in result["linears"])
    run = result["runs"]["lowbit"]
    assert (run["graphs"], run["recompiles"]) == (2, 0)  # training, and evaluation without gradients
    assert len(run["losses"]) == 5
    assert result["date"]
    assert result["command"]
    assert "lowbit.linear" in (tmp_path / "graphs" / "graph0_after.py").read_text()
    assert {"report.json", "loss.csv", "loss.png"} <= {f.name for f in tmp_path.iterdir()}
