"""Configs: strict, overridable, and every mistake reported at once."""

from __future__ import annotations

import pytest

from sharpen.config import Config, ConfigError, load_config


class Inner(Config):
    rate: float = 0.1


class Outer(Config):
    name: str
    lora_r: int = 8
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()


def write(tmp_path, text: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_file_interpolation_and_overrides(tmp_path):
    path = write(
        tmp_path, "name: x\nlora_r: 4\ninner: {rate: 0.5}\nmany: [{rate: '${inner.rate}'}]"
    )
    config = load_config(Outer, path, ["lora_r=16", "many.0.rate=2", "name=a=b"])
    assert (config.name, config.lora_r, config.many[0].rate) == ("a=b", 16, 2.0)
    assert load_config(Outer, path).many[0].rate == 0.5


def test_all_errors_on_one_line(tmp_path):
    path = write(tmp_path, "lora_rr: 4\ninner: {rat: 1}\nmany: [{rate: hot}]")
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, path)
    text = str(caught.value)
    assert "\n" not in text
    assert "name: missing" in text
    assert "lora_rr: unknown field, did you mean 'lora_r'?" in text
    assert "inner.rat: unknown field, did you mean 'rate'?" in text
    assert "many.0.rate" in text and "'hot'" in text


def test_direct_construction_explains_too():
    with pytest.raises(ConfigError, match=r"Outer: .*did you mean 'lora_r'"):
        Outer(name="x", lora=3, lorar=4)


def test_configs_are_frozen_and_hashed():
    a, b = Outer(name="x"), Outer(name="x", lora_r=9)
    assert a.hash() == Outer(name="x").hash() != b.hash()
    with pytest.raises(Exception, match="frozen"):
        a.lora_r = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "overrides", "complaint"),
    [
        ("a: [1", [], r"c\.yaml:1:6: not YAML"),
        ("a:\n  - b\n c: d", [], r"c\.yaml:3"),
        ("- 1", [], "expected a mapping"),
        ("name: ${gone}", [], "gone"),
        ("name: x", ["lora_r"], "expected key=value"),
        ("name: x", ["=3"], "expected key=value"),
        ("name: x", ["lora_r=[1"], "overrides|c.yaml"),
    ],
)
def test_broken_input_is_one_line(tmp_path, text, overrides, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_config(Outer, write(tmp_path, text), overrides)
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(Outer, tmp_path / "gone.yaml")
    path = tmp_path / "b.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(Outer, path)
