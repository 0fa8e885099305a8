"""What a message says besides what is wrong."""

from fp8study.core.errors import nearest


def test_nearest_stays_silent_when_nothing_is_near() -> None:
    assert nearest("zzz", ["bf16", "fp8"]) == ""
    assert nearest("bf61", ["bf16", "fp8"]) == " (did you mean 'bf16'?)"


def test_nearest_takes_capital_letters_for_small_ones() -> None:
    assert nearest("BF16", ["bf16", "fp16"]) == " (did you mean 'bf16'?)"
    assert nearest("makefile", ["other", "Makefile"]) == " (did you mean 'Makefile'?)"
