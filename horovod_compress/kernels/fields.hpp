// Integer codes of a few bits side by side in words.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "common.hpp"
#include "random.hpp"

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

// Words of codes: `encode(first, count, put)` calls put(j, code) for element first + j, j below count. Signed codes borrow from the
// fields above; the sum of words is then the word of the sums, and no addition leaves the range of a signed word.
template <class Word, class Encode>
HC_INLINE void pack(std::uint8_t* words, const Layout& layout, Encode encode) {
    using Unsigned = std::make_unsigned_t<Word>;
    Unsigned sums[kWordBlock] = {};
    layout.blocks(
        [&](int field, std::size_t, std::size_t first, std::size_t count) HC_HOT {
            const int shift = field * layout.width;
            encode(first, count, [&](std::size_t j, std::int32_t code) HC_HOT { sums[j] += static_cast<Unsigned>(code) << shift; });
        },
        [&](std::size_t word, std::size_t count) HC_HOT {
            std::memcpy(words + word * sizeof(Word), sums, count * sizeof(Word));
            std::memset(sums, 0, sizeof sums);
        });
}

// Words of the codes that `code(i, bits)` gives for element i of x and random bits. Two fields of a word share these: the second takes
// their product with kSecond.
template <class Word, class Code>
HC_INLINE void pack_random(const float* x, std::uint8_t* words, const Layout& layout, Key key, Code code) {
    using Unsigned = std::make_unsigned_t<Word>;
    const std::size_t fields = layout.fields;
    Unsigned sums[kWordBlock];
    for (std::size_t word = 0; word < layout.words; word += kWordBlock) {
        const std::size_t begin = word * fields, many = std::min(kWordBlock, layout.words - word), end = std::min(layout.n, begin + many * fields);
        for (std::size_t j = 0; j < many; ++j) sums[j] = 0;
        for (std::size_t field = 0, first = begin; field < fields && first < end; field += 2, first += 2 * many) {
            const std::size_t second = first + many, count = std::min(many, end - first);
            const std::size_t both = field + 1 < fields && second < end ? std::min(many, end - second) : 0;
            const std::uint32_t start = static_cast<std::uint32_t>(word + field / 2 * layout.words);
            const int shift = static_cast<int>(field) * layout.width, next = shift + layout.width;
            fetch_ahead(x + first + 2 * kWordBlock, count + both);
            HC_APART
            for (std::uint32_t j = 0; j < both; ++j) {
                const std::uint32_t bits = random_bits(start + j, key);
                const std::int32_t low = code(first + j, bits), high = code(second + j, bits * kSecond);
                sums[j] += (static_cast<Unsigned>(low) << shift) + (static_cast<Unsigned>(high) << next);
            }
            for (std::size_t j = both; j < count; ++j) {
                const std::int32_t last = code(first + j, random_bits(start + static_cast<std::uint32_t>(j), key));
                sums[j] += static_cast<Unsigned>(last) << shift;
            }
        }
        std::memcpy(words + word * sizeof(Word), sums, many * sizeof(Word));
    }
}

// Hands out the sums of all elements: `decode(first, count, sum)` gets that of element first + j from sum(j). offset: the largest
// magnitude that a sum can have, 0 for sums that are not signed.
template <class Word, class Decode>
HC_INLINE void unpack(const std::uint8_t* words, const Layout& layout, std::uint64_t offset, Decode decode) {
    using Unsigned = std::make_unsigned_t<Word>;
    Unsigned offsets = 0;
    for (int field = 0; field < layout.fields; ++field) offsets += static_cast<Unsigned>(offset) << (field * layout.width);
    const Unsigned mask = static_cast<Unsigned>(~0ull >> (64 - layout.width)), less = static_cast<Unsigned>(offset);
    layout.blocks(
        [&](int field, std::size_t word, std::size_t first, std::size_t count) HC_HOT {
            const int shift = field * layout.width;
            const std::uint8_t* from = words + word * sizeof(Word);
            decode(first, count, [=](std::size_t j) HC_HOT {
                Unsigned its;
                std::memcpy(&its, from + j * sizeof its, sizeof its);
                return static_cast<std::int32_t>(((its + offsets) >> shift & mask) - less);
            });
        },
        [](std::size_t, std::size_t) HC_HOT {});
}

}  // namespace hc
