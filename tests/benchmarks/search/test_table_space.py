"""Configurations of a table, told apart by what no knob says."""

from benchmarks.search.tables.table_space import TableConfig


def test_a_variant_is_part_of_what_a_configuration_is() -> None:
    plain, other = TableConfig(variant="optimizer=None"), TableConfig(variant="optimizer=AdamW")
    assert plain.hash != other.hash
    assert plain.values()["variant"] == "optimizer=None"
    assert plain.replace({"zero_stage": 1}).variant == plain.variant
    assert plain.replace({"zero_stage": 1}).replace({"zero_stage": plain.zero_stage}).hash == plain.hash
