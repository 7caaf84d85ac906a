"""Texts that are shown to users."""

from __future__ import annotations

import pytest

from wdskit.text import hide_secrets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://h/a?sig=x: gone.", "http://h/a: gone."),
        ("see `https://me:pw@h:80/a?b=c&d=e`, or not", "see `https://h:80/a`, or not"),
        ("hf://datasets/o/n@main/x.tar", "hf://datasets/o/n@main/x.tar"),
        ("s3://b/k?x=y::s3://b/k2?z", "s3://b/k"),
        ("is it s3://b/k? No.", "is it s3://b/k? No."),
        ("http://h/a?x=y z&sig=1: gone, b", "http://h/a: gone, b"),
        ("http:/me:pw@h/a?x", "http:/h/a"),
        ("s3://AK:a/b#c@b/k or http://[::1]:80/a@b", "s3://b/k or http://[::1]:80/a@b"),
        ("http://h:80/a@b, a?b", "http://h:80/a@b, a?b"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_what_may_be_a_secret(text, expected):
    assert hide_secrets(text) == expected
    assert hide_secrets(expected) == expected
