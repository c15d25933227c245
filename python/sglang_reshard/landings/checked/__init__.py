"""Checksums of weights that are equal for any sharding: do engine ranks hold the weights that trainer ranks sent?

In:  the engine ranks' traced copies, and the trainer ranks' local tensors. Out: per engine rank at most MAX_GROUPS
numbers, computed from its own memory (`target.TargetChecksums`) and, in parts that add up, from the trainer's
(`source.SourceChecksums`); and one digest of the whole model (`whole_model`). In an update `target.Checks` requests
and compares them, and `source.TrainerChecks` answers.

    target = TargetChecksums(tensor_index, program)                          # on an engine rank, once per trace
    source = SourceChecksums(layout, shards, trainer_rank, regions_of_all)   # on a trainer rank, once per trace
    parts = [source.compute(selection) for source in sources]                # once per update, on every trainer rank
    expected = sum(part.engine_ranks for part in parts)                      # modulo 2^64, as numpy adds uint64
    differing = np.flatnonzero(target.compute(selection) != expected[engine_rank])
    target.tensor_names(differing.tolist())

region set    what an engine rank keeps of the checkpoint: regions of tensors, each with a dtype and a number of copies
selection     the elements that a checksum covers: all of them, or a sample
coefficient   the odd factor of an element, from its position in the whole tensor

**Definition.** An element in row `r` and column `c` of a whole tensor (the column is its index in the last dimension,
the row its row-major index in the other dimensions) contributes

    row_coefficient(r) * column_coefficient(c) * (bits + 1)        modulo 2^64

`bits` is its bit pattern as an unsigned integer, in the engine's dtype: trainer ranks cast each chunk as the copy does,
so that float32 weights are comparable with bfloat16 ones. Coefficients are pseudo-random odd numbers. Elements of fewer
than 32 bits that share a 32-bit word of a row share its coefficient, shifted by their position in the word; an element
of 64 bits is two words. The sum depends neither on the order of the elements nor on how they are split, so it is the
same for any two layouts; because of the 1, zeros count, and so does a part that is missing. A tensor's sum is
multiplied by a separate odd number, once for each copy that the engine rank keeps. Sums of neighbouring tensors are
added up into groups. Fills and padding are not elements of the checkpoint and have no checksum.

**Detected.** A difference in one 32-bit word of a rank's group (one flipped bit, one wrong element) is always detected,
because odd numbers are invertible modulo 2^64. Several differing words are detected unless they cancel. Let `v` be the
number of low zero bits that the differences of all these words have in common. For random coefficients, the difference
of two checksums is

    sum over columns of column_coefficient(c) * (sum over rows of row_coefficient(r) * difference(r, c))

The inner sum has k low zero bits with a probability of at most 2^-(k - v - 1), and the outer sum is then 0 with
a probability of at most 2^-(63 - k). Together: (64 - v) * 2^-(62 - v), which is less than 2^-55 if any word differs in
its lowest bit (exchanged rows, slices or shards, a transposed slice, a stale tensor), and less than 2^-25 if words
differ in nothing but their highest bit. Exchanged tensors of equal shape are detected in the same way, by the
tensors' own numbers. A sample detects what differs in the rows that it covers.

**Not detected.** The coefficients are not secret, so this is no protection against forged weights. Checksums cover the
path of the elements along the traced copies; that these are the loader's is tested by `oracle`. All NaNs that a cast
produces count as the same NaN.
"""
