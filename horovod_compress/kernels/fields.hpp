// Integer codes of a few bits side by side in words.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "common.hpp"

namespace hc {

constexpr std::size_t kWordBlock = 1024;  // words of a block: its codes stay in the first-level cache

// Elements go to words by blocks: of the elements for a block of words, the first of each word come first, then the second …, so
// whole vectors of elements go into whole vectors of words, and memory is read in order. Words have 32 bits, and 64 where those
// hold over a tenth more. `spare` bits at the top stay free.
struct Layout {
    std::size_t n, words;
    int width, fields;
    bool wide;
    Layout(std::size_t count, int field_width, int spare) : n(count), width(field_width) {
        if (width < 1 || width > 64 - spare) throw std::invalid_argument("a field has 1 to 64 bits");
        const int in_32 = (32 - spare) / width, in_64 = (64 - spare) / width;
        wide = 10 * in_64 > 22 * in_32;
        fields = wide ? in_64 : in_32;
        words = (n + fields - 1) / fields;
    }

    // Calls work(field, its words' first, its elements' first, count) for the fields of each block, and done(first, count) after each
    // block's last.
    template <class Work, class Done>
    HC_INLINE void blocks(Work work, Done done) const {
        for (std::size_t word = 0; word < words; word += kWordBlock) {
            const std::size_t start = word * fields, many = std::min(kWordBlock, words - word), end = std::min(n, start + many * fields);
            for (int field = 0; field < fields; ++field) {
                const std::size_t first = start + field * many;
                if (first >= end) break;
                work(field, word, first, std::min(many, end - first));
            }
            done(word, many);
        }
    }
};

// Words of the codes that `encode(field, word, first, count, codes)` gives. Signed codes borrow from the fields above; the sum of words
// is then the word of the sums, and no addition leaves the range of a signed word.
template <class Word, class Encode>
HC_INLINE void pack(std::uint8_t* words, const Layout& layout, Encode encode) {
    using Unsigned = std::make_unsigned_t<Word>;
    std::int32_t codes[kWordBlock];
    Unsigned sums[kWordBlock] = {};
    layout.blocks(
        [&](int field, std::size_t word, std::size_t first, std::size_t count) HC_HOT {
            encode(field, word, first, count, codes);
            const int shift = field * layout.width;
            for (std::size_t j = 0; j < count; ++j) sums[j] += static_cast<Unsigned>(codes[j]) << shift;
        },
        [&](std::size_t word, std::size_t count) HC_HOT {
            std::memcpy(words + word * sizeof(Word), sums, count * sizeof(Word));
            std::memset(sums, 0, sizeof sums);
        });
}

// Hands the sums of all elements to `decode(first, count, sums)`. offset: the largest magnitude that a sum can have, 0 for sums that
// are not signed.
template <class Word, class Decode>
HC_INLINE void unpack(const std::uint8_t* words, const Layout& layout, std::uint64_t offset, Decode decode) {
    using Unsigned = std::make_unsigned_t<Word>;
    Unsigned block[kWordBlock];
    std::int32_t sums[kWordBlock];
    Unsigned offsets = 0;
    for (int field = 0; field < layout.fields; ++field) offsets += static_cast<Unsigned>(offset) << (field * layout.width);
    const Unsigned mask = static_cast<Unsigned>(~0ull >> (64 - layout.width)), less = static_cast<Unsigned>(offset);
    layout.blocks(
        [&](int field, std::size_t word, std::size_t first, std::size_t count) HC_HOT {
            if (field == 0) std::memcpy(block, words + word * sizeof(Word), count * sizeof(Word));
            const int shift = field * layout.width;
            for (std::size_t j = 0; j < count; ++j)
                sums[j] = static_cast<std::int32_t>(((block[j] + offsets) >> shift & mask) - less);
            decode(first, count, sums);
        },
        [](std::size_t, std::size_t) HC_HOT {});
}

}  // namespace hc
