"""Immediate dominators of a graph: what would go if one node went."""

from collections.abc import Sequence


def immediate_dominators(successors: Sequence[Sequence[int]], root: int = 0) -> list[int]:
    """Return the immediate dominator of each node, the root's own being itself, -1 where it cannot be reached.

    Node ``d`` dominates ``n`` when every path from the root to ``n`` passes ``d``: removing ``d`` frees ``n``.
    The algorithm is Lengauer and Tarjan's (1979) in its simple form, without recursion.
    """
    order, number, parent = _depth_first(successors, root)
    count = len(order)
    before: list[list[int]] = [[] for _ in range(count)]
    for index, node in enumerate(order):
        for target in successors[node]:
            before[number[target]].append(index)
    above = _dominators_by_number(before, parent)
    result = [-1] * len(successors)
    for index, node in enumerate(order):
        result[node] = order[above[index]]
    return result


def _depth_first(successors: Sequence[Sequence[int]], root: int) -> tuple[list[int], list[int], list[int]]:
    """Return the nodes in order of discovery, each node's place in it (-1 unreached), and parents by place."""
    number = [-1] * len(successors)
    number[root] = 0
    order, parent = [root], [0]
    stack = [(0, iter(successors[root]))]
    while stack:
        place, targets = stack[-1]
        for target in targets:
            if number[target] < 0:
                number[target] = len(order)
                order.append(target)
                parent.append(place)
                stack.append((number[target], iter(successors[target])))
                break
        else:
            stack.pop()
    return order, number, parent


def _dominators_by_number(before: list[list[int]], parent: list[int]) -> list[int]:
    count = len(before)
    semi = list(range(count))
    best = list(range(count))
    ancestor = [-1] * count
    above = [0] * count
    bucket: list[list[int]] = [[] for _ in range(count)]

    def evaluate(node: int) -> int:
        """Return the node with the least semidominator on the linked path above ``node``."""
        if ancestor[node] < 0:
            return node
        path = []
        while ancestor[ancestor[node]] >= 0:
            path.append(node)
            node = ancestor[node]
        for lower in reversed(path):
            upper = ancestor[lower]
            if semi[best[upper]] < semi[best[lower]]:
                best[lower] = best[upper]
            ancestor[lower] = ancestor[upper]
        return best[path[0] if path else node]

    for node in range(count - 1, 0, -1):
        least = node
        for source in before[node]:
            candidate = semi[evaluate(source)] if source > node else source
            least = min(least, candidate)
        semi[node] = least
        bucket[least].append(node)
        up = parent[node]
        ancestor[node] = up
        for waiting in bucket[up]:
            candidate = evaluate(waiting)
            above[waiting] = candidate if semi[candidate] < semi[waiting] else up
        bucket[up].clear()
    for node in range(1, count):
        if above[node] != semi[node]:
            above[node] = above[above[node]]
    return above
