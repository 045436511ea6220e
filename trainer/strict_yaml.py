"""Read hand-written YAML as plain data, with limits on size and depth, and strictly where PyYAML guesses."""

from __future__ import annotations

from itertools import count
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from data_prep.json_text import shown

LARGEST_YAML_BYTES = 1 << 18  # bytes; a configuration has a few thousand, and PyYAML reads some 100,000 per second
DEEPEST_YAML = 32
MOST_VALUES = 100_000  # each use of an alias counts
_TAG = "tag:yaml.org,2002:"


def parse_yaml(text: str) -> Any:
    """Parse one document of mappings with text keys, lists, texts, numbers, booleans and null. Nothing is shared.

    A date is read as text. ``<<: *name`` merges a mapping into another one, whose own keys win. Raises ValueError, in
    one line, for anything else: invalid YAML, a key that is repeated or not text, a tag that does not fit its value, or
    a document that is too deep or too large, perhaps because of nested aliases.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _unshared(loader.construct_object(node, deep=True), count(1))
    except (yaml.YAMLError, OverflowError) as error:  # OverflowError and ValueError: an escape such as "\\UFFFFFFFF"
        raise ValueError(" ".join(str(error).split())) from None


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a value and its contents; refuse deep nesting before PyYAML reads it."""
        self._depth += 1
        if self._depth > DEEPEST_YAML:
            mark = None if parent is None else parent.start_mark
            raise ConstructorError(None, None, f"nested more than {DEEPEST_YAML} levels deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping's own keys and those of the mappings it merges, where the first one wins."""
        own, merged = dict[Any, Any](), dict[Any, Any]()
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                merged = self._merged(value_node) | merged
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                said = f"the key {shown(key)} is a {type(key).__name__}: write it in quotes"
                raise ConstructorError(None, None, said, key_node.start_mark)
            if key in own:
                raise ConstructorError(None, None, f"the key {shown(key)} is repeated", key_node.start_mark)
            own[key] = self.construct_object(value_node, deep=True)
        return merged | own

    def _merged(self, node: yaml.Node) -> dict[Any, Any]:
        """Return the keys that ``<<`` merges, from a mapping or a list of mappings."""
        merged = dict[Any, Any]()
        for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(each, yaml.MappingNode):
                raise ConstructorError(None, None, "<< merges mappings, as in `<<: *name`", each.start_mark)
            merged = self.construct_object(each, deep=True) | merged
        return merged

    def construct_number(self, node: yaml.Node) -> Any:
        """Construct an int, float or bool, whose tag may be explicit."""
        try:
            return yaml.SafeLoader.yaml_constructors[node.tag](self, node)
        except (ValueError, LookupError, OverflowError):
            said = f"{shown(node.value)} is not a valid {node.tag.removeprefix(_TAG)}"
            raise ConstructorError(None, None, said, node.start_mark) from None


_Loader.yaml_constructors = {
    **{_TAG + kind: yaml.SafeLoader.yaml_constructors[_TAG + kind] for kind in ("null", "str", "seq", "map")},
    **{_TAG + kind: _Loader.construct_number for kind in ("bool", "int", "float")},
    None: yaml.SafeLoader.yaml_constructors[None],  # refuses all other tags
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_TAG + "timestamp", _TAG + "value")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _unshared(value: Any, values: count[int], depth: int = 1) -> Any:
    """Copy ``value`` so that each use of an alias is a separate value."""
    if next(values) > MOST_VALUES or depth > DEEPEST_YAML:
        raise yaml.YAMLError(f"aliases expand to more than {MOST_VALUES:,} values or {DEEPEST_YAML} levels")
    match value:
        case dict():
            return {key: _unshared(inner, values, depth + 1) for key, inner in value.items()}
        case list():
            return [_unshared(inner, values, depth + 1) for inner in value]
    return value
