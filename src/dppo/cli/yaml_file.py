"""Reads a flat YAML mapping; a broken file is an error with its line and column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dppo.errors import ConfigurationError


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the file of `--config`.

    Args:
        path: The file.

    Returns:
        Its top-level mapping; empty for an empty file.

    Raises:
        ConfigurationError: If the file cannot be read, is not YAML, is not a mapping, has a key
            twice, or PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError("--config needs PyYAML: pip install pyyaml") from error
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "unknown place"
        raise ConfigurationError(f"{path}: broken YAML at {place}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: broken YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: expected `name: value` lines, got {content!r:.60}")
    _refuse_repeats(path, node)
    return content


def _refuse_repeats(path: Path, node: Any) -> None:
    """PyYAML lets the last of two equal keys win; here that is an error."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.value in seen:
            raise ConfigurationError(
                f"{path}: line {line}, column {key.start_mark.column + 1}: {key.value} is already "
                f"on line {seen[key.value]}"
            )
        seen[key.value] = line
