"""A process of a data preparation pool is OOM-killed: BrokenProcessPool."""

from concurrent.futures import ProcessPoolExecutor


def tokenize(part):
    kept = []
    while part == 1:
        kept.append(bytearray(8 << 20))
    return part


if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        print(list(pool.map(tokenize, range(4))))
