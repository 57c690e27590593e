"""How many insertions, deletions and substitutions lead from one sequence to another (Levenshtein 1966)."""

from collections.abc import Hashable, Sequence


def edit_distance(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """By bit vectors (Myers 1999, doi:10.1145/316542.316550): a column of the table is one long number, so that texts of ten
    thousand characters take some hundredths of a second."""
    if not one:
        return len(other)
    places: dict[Hashable, int] = {}
    for index, item in enumerate(one):
        places[item] = places.get(item, 0) | 1 << index
    every, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    rises, falls, distance = every, 0, len(one)  # down the column: bits where the next entry is one more, one less
    for item in other:
        equal = places.get(item, 0)
        diagonal = (((equal & rises) + rises) ^ rises) | equal
        right_rises = falls | ~(diagonal | rises)
        right_falls = rises & diagonal
        distance += bool(right_rises & last) - bool(right_falls & last)
        right_rises = right_rises << 1 | 1
        vertical = equal | falls
        rises = (right_falls << 1 | ~(vertical | right_rises)) & every
        falls = right_rises & vertical & every
    return distance
