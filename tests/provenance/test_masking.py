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
        "token_ids = [1, 2]", "max_tokens: 512", "tokens: 512", "x = tokenizer.pad_token_id", "sorted(a, key=lambda x: x)",
        "    password: str", "    api_key: SecretStr | None = None", "token = tokenizer.eos_token", "key: torch.int64",
        "api_key = os.environ['HF_TOKEN']", 'key = "model.layers.12.self_attn"', "token = next_token(logits1, 2)",
        'NAME_OF_API_KEY = "OPENAI_API_KEY"', "export HF_TOKEN=$OTHER", 'f"token={token}"', "keys = queries1",
        "https://host:8080/a@v1", "+        key = block_key", "self.password = password", "credentials = provider", "key_states = self.k_proj(hidden1)", 'mask_token = "<extra_id_0>"',
    ],
)  # fmt: skip
def test_source_that_is_no_secret_stays_as_it_is(mask, text):
    assert mask.text(text, source=True) == text


AWS = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
HEX = "0123456789abcdef0123456789abcdef01234567"
IN_SOURCE = [
    (f"export AWS_SECRET_ACCESS_KEY={AWS}", AWS), ("HF_TOKEN=plain12345678", "plain12345678"),
    ("HF_TOKEN=plainwords python train.py", "plainwords"), ("password: hunter2hunter", "hunter2hunter"),
    ("- password: hunterhunter  # x", "hunterhunter"), (f"aws_secret_access_key = {AWS}", AWS),
    ("api_key='abcdefghijklmnop'", "abcdefghijklmnop"), ("password='s3cret'", "s3cret"), ("password: str = 's3cret'", "s3cret"),
    ("TOKEN = 'abcdefghijkl123'", "abcdefghijkl123"), (f"wandb.login(key='{HEX}')", HEX),
    ('os.environ["HF_TOKEN"] = "plain-words"', "plain-words"), ('getenv("HF_TOKEN", "plain-words")', "plain-words"),
    ("ENV HF_TOKEN plainwords", "plainwords"), ('curl -H "X-Api-Key: abcd1234"', "abcd1234"),
]  # fmt: skip


@pytest.mark.parametrize("before", ["", "    ", "+", "-", " ", "+    "])
@pytest.mark.parametrize(("line", "secret"), IN_SOURCE)
def test_assigned_in_source_and_in_diffs(mask, line, secret, before):
    text = mask.text(f"x = 1\n{before}{line}\ny = 2\n", source=True)
    assert secret not in text and text.startswith(f"x = 1\n{before}") and text.endswith("\ny = 2\n")
    assert mask.text(text, source=True) == text == mask.text(text, source=True)


@pytest.mark.parametrize(
    ("text", "gone", "stays"),
    [
        ("HTTPS_PROXY=user:pw@proxy:80", "user:pw", "@proxy:80"), ("http://tok@proxy", "tok", "@proxy"),
        ("https://user:pa/ss@host", "pa/ss", "@host"), ("https://user:p@ss@host/x", "p@ss", "@host/x"),
        ("Authorization: Token abcd1234", "abcd1234", "Authorization: Token "), ("X-Api-Key: abcd1234", "abcd1234", "X-Api-Key"),
        ("serve --api-key abc123456 --port 80", "abc123456", "--port 80"), ("X=1 HF_TOKEN=abc12", "abc12", "X=1"),
        ("a wandb_v1_AbCdEf123456_xyz key", "AbCdEf123456_xyz", "a <masked"), ("a: password=x1y2", "x1y2", "a: password="),
        ("https://x/y?token=abcdef123&sig=zzz", "zzz", "https://x/y?token=<masked "),
    ],
)  # fmt: skip
def test_elsewhere(mask, text, gone, stays):
    masked = mask.text(text)
    assert gone not in masked and stays in masked
    assert mask.text(masked) == masked, "a mask is never masked again"
    assert "<masked" not in MASK.sub("", masked), "every mask is whole"


@pytest.mark.parametrize(
    ("argv", "gone"),
    [
        (["--secret_key", "-abc"], "-abc"), (["--password:abc"], "abc"), (["--header", "X-Api-Key: abcd1234"], "abcd1234"),
        (["-e", "X=1 HF_TOKEN=abc12"], "abc12"), (["-H", "Authorization: Token abcd1234"], "abcd1234"),
        (["https://u:pw9@h/?token=x"], "pw9"), (["++sink.api_key=abc"], "=abc"),
    ],
)  # fmt: skip
def test_arguments(mask, argv, gone):
    assert gone not in " ".join(mask.arguments(argv)) and "<masked " in " ".join(mask.arguments(argv))


def test_arguments_that_are_no_secrets(mask):
    argv = ["serve", "--max-tokens", "512", "--use-key", "--port", "80", "train.batch_tokens=4096", "model:7b"]
    assert mask.arguments(argv)[:6] == argv[:6] and mask.arguments(argv)[7] == argv[7]


def test_a_tree_by_name(mask):
    planted = {"password": 12345678, "token": {"value": "abc123", "n": [7654321]}, SHAPES[0]: 1,
               "SERVE": "--api-key abc123456", "HTTPS_PROXY": "user:pw@proxy:80", "max_tokens": 512, "batch_tokens": 64,
               "HF_TOKEN": None, "mask_token_id": 7}  # fmt: skip
    out = mask.tree(planted, by_name=True)
    said = json.dumps(out)
    assert not [s for s in ("12345678", "abc123", "7654321", SHAPES[0], "user:pw") if s in MASK.sub("", said)]
    assert (out["max_tokens"], out["batch_tokens"], out["HF_TOKEN"], out["mask_token_id"]) == (512, 64, None, 7)
    assert mask.tree(out, by_name=True) == out


def test_sinks_get_a_masked_config(tmp_path, monkeypatch):
    from draftsmith import sinks
    from draftsmith.rundir import RunDir

    got = []
    for name in ("Wandb", "TensorBoard", "Trackio", "MLflow"):
        monkeypatch.setattr(sinks, name, lambda run, config: got.append(config))
    monkeypatch.setattr(sinks.env, "offline_tracking", lambda path: None)
    config = {"sink": {"api_key": "config-key-1", "url": "https://u:confpass@h/x"}, "steps": 3}
    sinks.open_sinks(list(sinks.PACKAGES), RunDir(tmp_path), config).close()
    assert len(got) == 4 and all(c["steps"] == 3 for c in got)
    assert "config-key-1" not in str(got) and "confpass" not in str(got)


def test_how_it_was_interrupted_is_masked(tmp_path, monkeypatch):
    from draftsmith.errors import Interrupted
    from draftsmith.provenance import recorder
    from draftsmith.rundir import RunDir

    ended = []
    record = recorder.Recorder.__new__(recorder.Recorder)
    record.rank, record.start = 0, {"gpu": {}}
    monkeypatch.setattr(recorder.Recorder, "_safely", lambda self, do, *args: ended.append(args))
    with pytest.raises(Interrupted), record.recording(RunDir(tmp_path)):
        raise Interrupted(15, f"stopped with {SHAPES[0]}")
    assert "stopped with <masked " in str(ended[-1]) and SHAPES[0] not in str(ended)


def test_the_whole_process_is_masked():
    from draftsmith.provenance.capture import _masked

    process = {"command": ["a", "--api-key", "argv-secret"], "folder": f"/x/{SHAPES[0]}", "pid": 1}
    out = _masked({"process": process})["process"]
    assert "argv-secret" not in str(out) and SHAPES[0] not in str(out) and out["pid"] == 1


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
