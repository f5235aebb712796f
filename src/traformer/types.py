"""Types of values that come from outside (YAML, JSON, keywords) and are checked where they are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Options = Mapping[str, Any]  # options of a method, task or model by name
JsonObject = dict[str, Any]  # what JSON and YAML write as {...}
