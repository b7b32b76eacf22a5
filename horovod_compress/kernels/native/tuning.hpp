// Numbers that were chosen for speed, or for accuracy at no cost, each with the reason. None of
// them is part of the wire format. Where one decides what a result is, in the last bits of a sum or
// in the choice between two codings, that is said: such a number is the same for all instructions,
// and the reference has the same where it says so.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hc::tuning {

// Memory (common.hpp).

// Bytes that a pass in plain order fetches ahead. Hardware stops at pages and does not fetch what
// is only written: on one host such lines took twice as long until they were fetched. On another
// one, fetching more at once had made sequential passes slower.
constexpr std::size_t kPrefetchBytes = 3072;
// Elements of one turn of a loop, as a constant that compilers know: four vectors of 16. `peaks` of
// max_abs has a number for as many, and so has the reference.
constexpr std::size_t kStretch = 64;
// Floats, 1 MiB, from which on an output goes past the caches: nobody reads it before other things
// have filled them, and a line that is written as a whole need not be read first. Decoding maxnorm
// took a tenth to half less.
constexpr std::size_t kPastCaches = 1 << 18;
// Stretches of the ring in which such an output waits before it is sent off: sent at once it would
// wait for vectors to be read back in smaller pieces, and many at once leave memory idle in
// between.
constexpr std::size_t kWaitingStretches = 4;
// Entries by which a pass over scattered elements fetches ahead: fewer and a line is not there in
// time, more and it is gone again. The first is for entries that are added or put back, the second
// for those that are taken out of v and u, two lines each.
constexpr std::size_t kScatterAhead = 48, kTakeAhead = 16;

// Bytes of memory that is made to begin on a cache line, at least: less is copied in less time than
// it takes to make a view.
constexpr std::size_t kAlignedBytes = 4096;

// Selection (select.hpp).

// Elements that share one maximum, four cache lines: only chunks that reach the floor are searched.
constexpr std::size_t kChunk = 64;
// Chunks of a block, after which those that hold candidates are searched, while the block is in the
// cache.
constexpr std::size_t kChunksOfBlock = 32;
// Standard deviations that the floor's rank in the sample lies above the wanted one: too few
// candidates, and further looks at v, are rare.
constexpr double kSampleMargin = 2;
// Times k that candidates fill before they are trimmed to k: more trims cost time, fewer leave the
// floor low.
constexpr std::size_t kTrimAt = 2;

// By how much the floor of a user's chunk lies below the least of what the chunk before sent, in
// floats' bits, a quarter of a factor of two; so much a tensor's floor is lowered first where fewer
// than k have passed. And by how much a chunk's is: a factor of four.
constexpr std::uint32_t kFloorMargin = 1u << 21, kFloorDrop = 1u << 24;

// What fires by itself (adaptive.cpp).

// Elements that are searched for hits, and taken out of the state, while they are in the
// first-level cache.
constexpr std::size_t kHitBlock = 256;
// Elements of bins that are worked on together: three arrays of as many stay in the first-level
// cache.
constexpr std::size_t kBinBlock = 1024;
// Places of ones that are written at once, some of them meaningless: a branch for each would cost
// more.
constexpr int kPlacesAtOnce = 4;

// Sums (codes.cpp, dense.cpp).

// Elements that are added up in float32, in 16 sums, before float64 takes over: fewer cost
// conversions, more lose bits. Decides last bits.
constexpr std::size_t kFloatSum = 1024;
// Elements of a block whose squares are scaled alike, and the binary orders that its largest may be
// off the scale in use before the block is summed again with its own: squares of numbers 2^30 apart
// stay in float32's range. Decide last bits.
constexpr std::size_t kMomentBlock = 4096;
constexpr int kFarOrders = 30;

// Buckets and Elias' code (buckets.cpp, elias.hpp).

// One bucket in so many is sampled for the length of Elias' code, which takes longer to write than
// all the rest; all, where there are so few. They decide about the coding; the reference has the
// same.
constexpr std::size_t kSampledBucket = 16, kFewBuckets = 64;
// Levels that one look into a table codes, and their largest: 3 bits each, 4096 codes, 32 KiB.
constexpr int kEliasGroup = 4, kEliasSmall = 3;
// Zeros before a group whose gap's code is looked up too: longer gaps are rare, and coded one by
// one.
constexpr int kEliasNear = 64;
// Bits that one look decodes, and levels that it writes at most: 2048 runs, 24 KiB, and one vector
// of levels each.
constexpr int kEliasLook = 11, kEliasSpan = 8;

// Products with few vectors (lowrank.cpp).

// Rows and vectors that are worked on together: what is loaded serves several products.
constexpr std::size_t kHeight = 4, kVectors = 4;
// Rows whose products are added to Q's lines at once: each time those are read and written.
constexpr std::size_t kAddedRows = 8;
// Floats, at least, by which rows are fetched ahead: short rows would be fetched too late.
constexpr std::size_t kRowsAhead = 4096;
// Rows of a sample's product that are worked on together with 16 columns: their sums stay in
// registers.
constexpr std::size_t kTall = 6;

}  // namespace hc::tuning
