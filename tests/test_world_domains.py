"""Every shipped domain file is fit for the data builder, and all of them together stay apart."""

from __future__ import annotations

import pytest

from domain_check import check_domain, clashes
from sharpen.world.episode import DOMAINS

FILES = sorted(DOMAINS.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_domain_file_has_no_problems(path):
    assert check_domain(path) == []


def test_names_and_descriptions_are_unique_across_the_world():
    assert clashes(FILES) == []
