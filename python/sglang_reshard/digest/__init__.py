"""Digests of weights that compare across shardings: do engine ranks have what the trainer ranks sent?

    auditor = Auditor(catalog, program)                                # on an engine rank, once a trace
    voucher = Voucher(layout, shards, trainer_rank, claims_of_all)     # on a trainer rank, once a set of claims
    parts = [voucher.digests(selection) for voucher in vouchers]       # once an update, selection agreed upon
    differing = np.flatnonzero(auditor.digests(selection) != sum(parts)[engine_rank])
    auditor.explain(differing.tolist())                                # names of tensors

The sum over the trainer ranks is modulo 2^64, as numpy's of uint64 is.

**What is computed.** An element in row `r` and column `c` of a whole tensor (a column is an index of the last
dimension, a row one of those before it in row-major order) contributes

    rows(r) * columns(c) * (bits + 1)        modulo 2^64

`bits` is its pattern, as an unsigned number, in the dtype that the engine keeps: a trainer rank casts a chunk as the
copy does, and so float32 weights compare with bfloat16 ones. `rows` and `columns` are pseudo-random odd numbers;
elements of fewer than 32 bits that share a word of a row share its number, shifted as they are in it, and one of
64 bits is two words. The sum depends neither on the order of the elements nor on how they are cut, so that any two
layouts agree; the 1 makes zeros count, and so a part that is missing. A tensor's sum is multiplied by an odd number
of its own, once for each place in which the engine rank keeps the region, and tensors that follow each other are
added up, so that a rank has at most GROUPS numbers. Fills are no elements of the checkpoint: no copy brings them, and
padding does not enter into a digest.

**What is noticed.** When one 32-bit word of a rank's group differs (one flipped bit, one wrong element), always: odd
numbers have an inverse. When more differ, unless they cancel. Let `v` be the number of low zero bits that all of the
words' differences have; for numbers that are random, the difference of two digests is

    sum over columns of columns(c) * (sum over rows of rows(r) * difference(r, c))

the inner sum has k low zero bits with a probability of at most 2^-(k - v - 1), and then the outer one is 0 with at
most 2^-(63 - k): (64 - v) * 2^-(62 - v) in all, less than 2^-55 when any word differs in its lowest bit (exchanged
rows, slices or shards, a transposed slice, a stale tensor) and less than 2^-25 when words differ in nothing but
their highest bit. Exchanged tensors of one shape are noticed alike, by the numbers of the tensors. A sample notices
what differs in the rows that it looks at.

**What is not.** The numbers are no secret: this is no defence against somebody who forges weights. It is about the
way of the elements along the traced loader's copies; whether those are the loader's is for `oracle`
to say. NaNs that a cast made count as one NaN.

weights    the numbers, by index
selection  all elements, or a sample
claims     what an engine rank keeps, as trainer ranks are told
bits       elements as integers
sums       views of memory -> digests, in chunks
whole      one number for a whole model, whatever its layouts
auditor    the engine rank's side
voucher    the trainer rank's side
"""
