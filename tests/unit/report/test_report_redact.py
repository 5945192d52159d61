"""The redactor: no planted secret survives in any spelling, the same thing has one name, ordinary lines stay."""

from __future__ import annotations

import json
import re
import string
import time
import uuid
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from legroom.report.redact import COMMON, PUBLIC_HOSTS, Identities, Redactor, harmless, readings, shape_of


def _percent_all(text: str) -> str:
    return "".join(f"%{byte:02x}" for byte in text.encode())


def _escape_all(text: str) -> str:
    units = text.encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


SPELLINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "upper": str.upper,
    "lower": str.lower,
    "url": lambda text: quote(text, safe=""),
    "url, lower": lambda text: quote(text, safe="").lower(),
    "url twice": lambda text: quote(quote(text, safe=""), safe=""),
    "url, every byte": _percent_all,
    "json": lambda text: json.dumps(text)[1:-1],
    "json, upper": lambda text: json.dumps(text)[1:-1].upper(),
    "json, every character": _escape_all,
    "json in json": lambda text: json.dumps(json.dumps(text)),
    "json in a url": lambda text: quote(json.dumps(text), safe=""),
    "url in json": lambda text: json.dumps({"at": quote(text, safe="")}),
    "python bytes": lambda text: repr(text.encode())[2:-1],
    "mountinfo": lambda text: text.replace(" ", r"\040"),
}
FRAMES = ("{}", "at {} now", '"{}"', "/data/{}/run", "a={}, b", "x\\n{}\\t", "C:\\{}\\y", "%2F{}%3A", "({})", "<{}>")

spellings = st.sampled_from(sorted(SPELLINGS))
frames = st.sampled_from(FRAMES)
letters = st.characters(categories=["Ll", "Lu"], max_codepoint=0x24F, exclude_characters="ıİſ")
names = (
    st.builds(
        lambda first, rest: first + rest,
        letters,
        st.text(letters | st.sampled_from("0123456789-_"), min_size=3, max_size=12),
    )
    .map(lambda name: name.rstrip("-_"))
    .filter(lambda name: len(name) >= 4 and name.casefold() not in COMMON)
)
file_names = st.builds(lambda stem, dot: f"{stem}.{dot}", names, st.sampled_from(["h5", "parquet", "npz", "pt", "csv"]))


def survives(secret: str, text: str) -> bool:
    """Whether the secret can be read in the text, in any way to read it."""
    return any(secret.casefold() in reading.text.casefold() for reading in readings(text))


def planted(frame: str, spelling: str, secret: str) -> str:
    # What the frame or a new name says anyway is not told by the secret.
    said = (frame + " user-1 host-1 file-1 id-1 ip-1 mac-1 email-1 home-1 <secret> _ .h5.parquet.npz.pt.csv").casefold()
    assume(secret.casefold() not in said)
    return frame.replace("{}", SPELLINGS[spelling](secret))


@given(names, spellings, frames)
@example("bob1", "plain", "C:\\{}\\y")
@example("straße", "upper", "{}")
@example("naïve", "mountinfo", "at {} now")
def test_a_known_user_is_hidden(name: str, spelling: str, frame: str) -> None:
    text = planted(frame, spelling, name)
    assert not survives(name, Redactor(Identities(users=frozenset({name}))).text(text))


@given(names, spellings, frames)
def test_a_known_host_is_hidden(name: str, spelling: str, frame: str) -> None:
    text = planted(frame, spelling, name)
    assert not survives(name, Redactor(Identities(hosts=frozenset({name}))).text(text))


@given(st.text(string.ascii_letters + string.digits + "+/=$%&!_-äé \"'\\", min_size=8, max_size=40), spellings, frames)
def test_a_known_secret_is_hidden_whatever_is_around_it(secret: str, spelling: str, frame: str) -> None:
    text = planted(frame, spelling, secret)
    out = Redactor(Identities(secrets=frozenset({secret}))).text(f"xyz{text}xyz")
    assert not survives(secret, out)


@given(file_names, spellings, frames)
def test_a_known_data_file_is_hidden_and_keeps_its_suffix(name: str, spelling: str, frame: str) -> None:
    text = planted(frame, spelling, name)
    out = Redactor(Identities(files=frozenset({name}))).text(text)
    assert not survives(name, out)
    assert f"file-1.{name.rpartition('.')[2]}" in out


@given(file_names, spellings.filter(lambda one: "every" not in one))
def test_an_unknown_data_file_is_hidden(name: str, spelling: str) -> None:
    text = planted("cannot open /data/{} now", spelling, name)
    assert not survives(name, Redactor().text(text))


@given(names, spellings)
def test_the_owner_of_a_home_directory_is_hidden_everywhere(name: str, spelling: str) -> None:
    redactor = Redactor()
    parts = [f'File "/home/{name}/train.py", line 3', f"{SPELLINGS[spelling](name)}: it failed"]
    assume(not any(name.casefold() in f'file "/home/user-1/train.py", line 3: it failed {word}' for word in ("_",)))
    redactor.learn(parts)
    assert not any(survives(name, redactor.text(part)) for part in parts)


ADDRESSES = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.ip_addresses(v=6).map(lambda address: address.exploded),
).filter(lambda text: not harmless("ip", text))
MACS = st.binary(min_size=6, max_size=6).map(lambda raw: ":".join(f"{byte:02x}" for byte in raw))
UUIDS = st.uuids().map(str)
WORDS = st.text(string.ascii_letters + string.digits + "._", min_size=6, max_size=20).filter(
    lambda word: re.fullmatch(r"[A-Za-z]\w*[._]?\w+", word) is not None
)


@given(ADDRESSES, spellings, st.sampled_from(["{}", "from {} to", "[{}]:29500", '"{}"', "tcp://{}/x"]))
def test_addresses_are_hidden(address: str, spelling: str, frame: str) -> None:
    assert not survives(address, Redactor().text(planted(frame, spelling, address)))


@given(MACS, spellings, st.sampled_from(["{}", "link/ether {} brd", '"{}"']))
def test_mac_addresses_are_hidden(mac: str, spelling: str, frame: str) -> None:
    assert not survives(mac, Redactor().text(planted(frame, spelling, mac)))


@given(UUIDS, spellings, st.sampled_from(["GPU-{}", "MIG-{}", "pod{}", "{}", "docker-{}.scope"]))
def test_gpu_and_container_ids_are_hidden(number: str, spelling: str, frame: str) -> None:
    redactor = Redactor()
    assert not survives(number, redactor.text(planted(frame, spelling, number)))
    bare = number.replace("-", "")
    assert not survives(bare, redactor.text(planted("docker-{}.scope", spelling, bare)))
    assert redactor.text(f"GPU-{number}").startswith("GPU-id-")


@given(WORDS, names, spellings)
def test_e_mail_is_hidden(who: str, where: str, spelling: str) -> None:
    address = f"{who}@{where}.example"
    assert not survives(address, Redactor().text(planted("by {} today", spelling, address)))


@given(WORDS, spellings)
def test_credentials_in_a_url_are_hidden(password: str, spelling: str) -> None:
    url = f"https://somebody:{password}@mlflow.example.corp:8443/runs?x=1"
    assume(password.casefold() not in url.replace(password, "").casefold() + "secret")
    assert not survives(password, Redactor().text(SPELLINGS[spelling](url)))


OPTIONS = ("--token", "--hf_token", "--password", "--api-key", "--key", "--wandb-api-key", "--secret", "-password")


@given(st.sampled_from(OPTIONS), WORDS, st.sampled_from(["{} {}", "{}={}", "'{}', '{}'", '{} "{}"', "{}\0{}"]))
def test_the_value_of_a_secret_option_is_hidden(option: str, value: str, frame: str) -> None:
    assume(
        value.casefold() not in "python train.py --token password api-key secret wandb hf_token --batch 16 none null"
    )
    line = f"python train.py {frame.format(option, value)} --batch 16"
    redactor = Redactor()
    out = redactor.text(line)
    assert not survives(value, out) and "--batch 16" in out
    listed = redactor.value(["python", "train.py", option, value, "--batch", "16"])
    assert listed == ["python", "train.py", option, "<secret>", "--batch", "16"]


@pytest.mark.parametrize(
    "token",
    [
        "hf_abcdefghijklmnopqrstuvwx",
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "AKIAIOSFODNN7EXAMPLE",
        "sk-proj-abcdefghijklmnop1234",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_tokens_are_found_by_their_format(token: str) -> None:
    for spelling in SPELLINGS.values():
        assert not survives(token, Redactor().text(f"login with {spelling(token)} failed"))


def test_a_private_key_is_hidden_as_a_whole() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nQUJD\n-----END RSA PRIVATE KEY-----"
    for text in (key, json.dumps(key), key.removesuffix("-----END RSA PRIVATE KEY-----")):
        out = Redactor().text(f"before {text} after")
        assert "MIIEow" not in out and "QUJD" not in out and "before" in out


def test_values_under_secret_names_are_hidden_and_counts_stay() -> None:
    given_ = {
        "api_key": "abcd",
        "WANDB_API_KEY": "x1",
        "max_tokens": 512,
        "tokens": "12",
        "nested": [{"password": "p"}],
    }
    out = Redactor().value(given_)
    assert out == {
        "api_key": "<secret>",
        "WANDB_API_KEY": "<secret>",
        "max_tokens": 512,
        "tokens": "12",
        "nested": [{"password": "<secret>"}],
    }
    assert Redactor().text("password=1234") == "password=<secret>"
    assert Redactor().text("pad_token_id: 0, max_token=512") == "pad_token_id: 0, max_token=512"


def test_one_file_has_one_name_in_every_part_and_two_have_two() -> None:
    redactor = Redactor(Identities(files=frozenset({"my train.h5"})))
    spelt = [spell("my train.h5") for name, spell in SPELLINGS.items() if not name.startswith(("url in", "json in"))]
    outs = [redactor.text(f"open /data/{text} failed") for text in spelt]
    assert set(outs) == {"open /data/file-1.h5 failed"}
    assert redactor.text("open /data/other.h5 failed") == "open /data/file-2.h5 failed"
    assert redactor.text("bob2 of file-list") == "bob2 of file-list"


def test_a_number_behind_a_name_is_not_part_of_the_new_one() -> None:
    redactor = Redactor(Identities(users=frozenset({"bobby"})))
    assert redactor.text("bobby bobby2 bobbyish") == "user-1 user-1_2 bobbyish"


@pytest.mark.parametrize(
    "line",
    [
        'File "/usr/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1327, in _try_get_data',
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB",
        "Epoch 3: 45%|####      | 450/1000 [00:12<00:15, 36.2it/s, loss=0.123]",
        "2026-11-15T10:00:00,123 INFO c10::Error std::bad_alloc at::native 0x7f00deadbeef 12:30:45",
        "vm.overcommit_memory=1 memory.max 0::/user.slice/user-1000.slice/user@1000.service",
        "listening on 127.0.0.1:9465, [::1]:80 and 0.0.0.0",
        "see https://pytorch.org/docs/stable/notes/cuda.html",
        "Python 3.11.7, torch 2.13.0+cu121, numpy 2.4.6",
        "    return self.model.net(torch.utils.data.default_collate(batch)).to(self.dev)",
        "[rank0]:[E1115 10:00:00.000 ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout",
    ],
)
def test_ordinary_lines_stay_as_they_are(line: str) -> None:
    redactor = Redactor(Identities(users=frozenset({"root", "memory", "max"}), hosts=frozenset({"vm", "localhost"})))
    redactor.learn(line)
    assert redactor.text(line) == line


@pytest.mark.parametrize("name", ["vm", "n7", "x"])
def test_a_short_host_name_is_hidden_as_a_word_of_its_own(name: str) -> None:
    redactor = Redactor(Identities(hosts=frozenset({name})))
    text = f'"built_by": "legroom 0.1.0, pid 4680 on {name}", at {name}:9465, then ({name}) and {name}.'
    assert redactor.text(text) == text.replace(name, "host-1")
    kept = f"{name}.overcommit_memory=1 /proc/sys/{name}/swappiness lib{name} {name}1 {name}-{name}et {name.upper()}"
    assert redactor.text(kept) == kept


def test_versions_are_not_addresses_where_that_is_known() -> None:
    assert Redactor().text("12.4.5.8") == "ip-1"
    assert Redactor().text("12.4.5.8", addresses=False) == "12.4.5.8"


@pytest.mark.parametrize("unit", ["A", "a_b-", "x.", "%41", "\\u0041", "1:", "a@", "--key "])
def test_long_lines_take_bounded_time(unit: str) -> None:
    assert Redactor().text(unit * (100_000 // len(unit))) is not None


def test_thousands_of_file_names_take_bounded_time() -> None:
    log = "".join(f"step {step}: read /data/set/image_{step:06d}.jpg\n" for step in range(15_000))
    redactor, began = Redactor(), time.process_time()
    redactor.learn(log)
    assert "file-15000.jpg" in redactor.text(log) and redactor.text("no name here\n" * 20_000)
    assert time.process_time() - began < 20  # a minute, where each name is tried at each place


@given(st.sets(st.text("xyXY-é1", min_size=4, max_size=9), min_size=1), st.text("xyXY-é1 .", max_size=60))
@example({"x" * count for count in range(4, 300)}, "x" * 200 + " " + "x" * 320)
def test_names_with_the_same_beginning_are_found_whole(given_names: set[str], text: str) -> None:
    longest_first = "|".join(map(re.escape, sorted(given_names, key=len, reverse=True)))
    expected = re.sub(rf"(?<![^\W_])(?:{longest_first})(?![^\W_])", "#", text, flags=re.IGNORECASE)
    hidden = Redactor(Identities(files=frozenset(given_names))).text(text)
    assert re.sub(r"file-\d+", "#", hidden).replace("_", "") == expected


@given(st.text())
def test_readings_point_back_into_the_text(text: str) -> None:
    for reading in readings(text):
        assert reading.span(0, len(reading.text)) == (0, len(text))
        places = [reading.span(at, at + 1) for at in range(len(reading.text))]
        assert all(0 <= start <= end <= len(text) for start, end in places)
        assert places == sorted(places)


@given(st.text(max_size=40))
def test_readings_undo_what_was_done(text: str) -> None:
    assume("\\" not in text and "%" not in text)
    for name in ("url", "json", "url twice", "url, every byte", "json, every character"):
        assert any(reading.text == text for reading in readings(SPELLINGS[name](text)))


@pytest.mark.parametrize(
    ("command", "shape"),
    [
        ("/home/me/venv/bin/python train.py --data /x/y.h5 --batch 32", "python train.py --data … --batch 32"),
        ("python /p/acme.py --lr=1e-3 --name=secret --pin 1234", "python acme.py --lr=… --name=… --pin …"),
        ("python -m torch.distributed.run --nproc 8 x.py", "python -m … --nproc 8 x.py"),
        ("python t.py --token 12345 --key=123", "python t.py --token … --key=…"),
        ("sshd: alice@pts/0", "sshd: …"),
        ("", ""),
    ],
)
def test_a_command_line_loses_its_values(command: str, shape: str) -> None:
    assert shape_of(command) == shape


def test_public_hosts_stay_and_others_are_hidden() -> None:
    redactor = Redactor()
    assert all(redactor.text(f"https://{host}/x") == f"https://{host}/x" for host in PUBLIC_HOSTS)
    assert redactor.text("https://mlflow.acme.corp/x and mlflow.acme.corp.") == "https://host-1/x and host-1."
    assert redactor.text("http://mlflow.tower9/x and mlflow.tower9") == "http://host-2/x and mlflow.tower9"
    redactor.learn("http://mlflow.tower9/x")
    assert redactor.text("and mlflow.tower9") == "and host-2"
    assert str(uuid.UUID(int=1)) not in redactor.text(str(uuid.UUID(int=1)))
