"""Planted secrets must not reach a manifest; what is no secret must reach it unharmed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from staging import recorded

from draftsmith.provenance.diff import diff
from draftsmith.provenance.masking import MASK, Masker, secret_name

JWT = "eyJhbGciOiJIUzI1NiIs.eyJzdWIiOiIxMjM0NTY3ODkwIn0.SflKxwRJSMeKKF2QT4fwpMeJf36P"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA75\n-----END RSA PRIVATE KEY-----"
SHAPES = [
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz123456", "sk-proj-abcdefghijklmnop1234567890", "ghp_abcdefghijklmnopqrstuvwxyz123456",
    "github_pat_11ABCDEFG0abcdefghijkl_mnopq", "AKIAIOSFODNN7EXAMPLE", "AIzaSyA1234567890abcdefghijklmnopqrstu",
    "glpat-abcdefghij1234567890", "xoxb-123456789012-abcdefghijkl", "nvapi-abcdefghijklmnopqrstuvwxyz", JWT, PEM,
]  # fmt: skip
NAMED = {
    "HF_TOKEN": "plain-words-only", "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "PIP_INDEX_URL": "https://ann:s3cret-pass@pypi.example.org/simple",
    "HTTPS_PROXY": "http://proxyuser:proxypass@proxy.example.org:3128",
    "VLLM_API_KEY": "short", "NCCL_SOCKET_PASSWORD": "letmein",
    "TORCH_STORE": "https://account.blob.example.net/c?sv=2024&sig=AbCdEf%2B123456789&se=2027",
    "HF_ENDPOINT": "AccountName=x;AccountKey=bWFzayBtZSBwbGVhc2U=;EndpointSuffix=core",
}  # fmt: skip
SECRETS = [
    *SHAPES, "plain-words-only", "0123456789abcdef0123456789abcdef01234567", "s3cret-pass", "proxypass", "letmein",
    "AbCdEf%2B123456789", "bWFzayBtZSBwbGVhc2U",
]  # fmt: skip


@pytest.fixture
def mask():
    return Masker(b"0" * 16)


@pytest.mark.parametrize("secret", SHAPES)
def test_by_shape_inside_any_text(mask, secret):
    text = mask.text(f"before {secret} after", source=True)
    assert secret not in text and text.startswith("before <masked ") and text.endswith("> after")


def test_planted_secrets_do_not_reach_the_manifest(tmp_path):
    """Environment, command line, git remote-like URLs, an uncommitted edit and a config, in a process of its own."""
    repository = tmp_path / "project"
    (repository / "pkg").mkdir(parents=True)
    (repository / "pkg" / "a.py").write_text("x = 1\n")
    for arguments in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "1"],
    ):
        subprocess.run(["git", "-C", str(repository), *arguments], check=True)
    (repository / "pkg" / "a.py").write_text(f'x = 1\napi_key = "k3y-written-in-source"\ny = "{SHAPES[0]}"\n')
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"sink": {"api_key": "config-key-1", "url": "https://u:confpass@h/x"}, "mask_token_id": 7})
    )
    code = (
        "import json, sys; from pathlib import Path; from draftsmith.provenance import capture, source;"
        "source_of = source.read_project(Path(sys.argv[1]));"
        "m = capture._masked({**capture.right_now('train', json.loads(Path(sys.argv[2]).read_text())),"
        " 'code': {'project': source_of}}); print(json.dumps(m))"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(repository),
        str(config),
        "--api-key",
        "argv-secret",
        "token=argv-second",
    ]
    environ = {**os.environ, **NAMED, **{f"TORCH_X{i}": s for i, s in enumerate(SHAPES)}}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    planted = [*SECRETS, "argv-secret", "argv-second", "config-key-1", "confpass", "k3y-written-in-source"]
    assert not [s for s in planted if s in done.stdout or json.dumps(s)[1:-1] in done.stdout]
    assert manifest["config"]["mask_token_id"] == 7
    assert "proxy.example.org:3128" in manifest["environment"]["at_exec"]["HTTPS_PROXY"], "only the secret is masked"
    assert "+x" not in manifest["code"]["project"]["diff"] and " x = 1" in manifest["code"]["project"]["diff"]


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "--api-key", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "db.password", "WANDBAPIKEY"]
)
def test_names_of_secrets(name):
    assert secret_name(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "PWD", "max_new_tokens", "mask_token_id", "PYTHONPATH", "MONKEY_BARS"]
)
def test_names_of_no_secrets(name):
    assert not secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "tokens_T = torch.from_numpy(row.tokens)", 'pad_token = "<|endoftext|>"', "token=tokenizer.eos_token_id",
        "git@github.com:owner/repository.git", "https://github.com/owner/repository", "ssh://git@host/x.git",
        "commit 5f0c5f0c5f0c5f0c5f0c5f0c5f0c5f0c5f0c5f0c", "def key(password): return hash(password)",
    ],
)  # fmt: skip
def test_source_that_is_no_secret_stays_as_it_is(mask, text):
    assert mask.text(text, source=True) == text


def test_masks_compare_under_one_salt_and_not_under_another(mask):
    assert mask.mask("a") == mask.mask("a") != mask.mask("b")
    assert MASK.fullmatch(mask.mask("a")) and mask.mask(mask.mask("a")) == mask.mask("a")
    other = Masker(b"1" * 16)

    def with_token(first: str, second: str):
        case = {"before": [[["environment", "at_exec", "HF_TOKEN"], first]],
                "after": [[["environment", "at_exec", "HF_TOKEN"], second]]}  # fmt: skip
        return diff(*recorded(case)(None))

    assert with_token(mask.mask("a"), mask.mask("a")).code == 0
    changed = with_token(mask.mask("a"), mask.mask("b"))
    assert [c.field for c in changed.changes] == ["environment.HF_TOKEN"] and changed.code == 1
    apart = with_token(mask.mask("a"), other.mask("a"))
    assert (apart.code, apart.line) == (2, "no change found, 1 unknown: cannot tell")
    assert replace(apart.unknown[0], why="") == replace(apart.unknown[0], why="", field="environment.HF_TOKEN")
    assert "another salt" in apart.unknown[0].why


def test_salt_is_made_once_and_for_the_user_alone(tmp_path, monkeypatch):
    from draftsmith.provenance.masking import masker

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert masker().mask("x") == masker().mask("x")
    salt = tmp_path / "draftsmith" / "salt"
    assert salt.stat().st_mode & 0o777 == 0o600 and [p.name for p in salt.parent.iterdir()] == ["salt"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(salt))  # a file: nothing can be kept there
    assert masker().mask("x") != masker().mask("x"), "throw-away salts never compare as equal"
