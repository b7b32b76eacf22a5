// Integer codes of a few bits side by side in words.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "common.hpp"
#include "random.hpp"

namespace hc {

constexpr std::size_t kWordBlock = 64;  // words of a block: a few vectors, so its sums stay near and memory is read as one stream

// Elements go to words by blocks: of the elements for a block of words, the first of each word come first, then the second …, so
// whole vectors of elements go into whole vectors of words. Words have 32 bits, and 64 where those
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

    // For each block of words: begin(word, many), work(field, word, first, count) for the elements of each field, done(word, many).
    // Of whole blocks the compiler knows many and count.
    template <class Begin, class Work, class Done>
    HC_INLINE void blocks(Begin begin, Work work, Done done) const {
        std::size_t word = 0;
        for (; (word + kWordBlock) * fields <= n; word += kWordBlock) {
            begin(word, kWordBlock);
            for (int field = 0; field < fields; ++field) work(field, word, word * fields + field * kWordBlock, kWordBlock);
            done(word, kWordBlock);
        }
        const std::size_t many = words - word;
        begin(word, many);
        for (std::size_t field = 0, first = word * fields; first < n; ++field, first += many)
            work(static_cast<int>(field), word, first, std::min(many, n - first));
        done(word, many);
    }
};

// Words of codes: `encode(first, count, put)` calls put(j, code) for element first + j, j below count. Signed codes borrow from the
// fields above; the sum of words is then the word of the sums, and no addition leaves the range of a signed word.
template <class Word, class Encode>
HC_INLINE void pack(std::uint8_t* words, const Layout& layout, Encode encode) {
    using Unsigned = std::make_unsigned_t<Word>;
    Unsigned sums[kWordBlock];
    layout.blocks(
        [&](std::size_t, std::size_t many) HC_HOT {
            for (std::size_t j = 0; j < many; ++j) sums[j] = 0;
        },
        [&](int field, std::size_t, std::size_t first, std::size_t count) HC_HOT {
            const int shift = field * layout.width;
            encode(first, count, [&](std::size_t j, std::int32_t code) HC_HOT { sums[j] += static_cast<Unsigned>(code) << shift; });
        },
        [&](std::size_t word, std::size_t many) HC_HOT { std::memcpy(words + word * sizeof(Word), sums, many * sizeof(Word)); });
}

// Words of the codes that `code(i, bits)` gives for element i and random bits, which the fields of a word share.
template <class Word, class Code>
HC_INLINE void pack_random(std::uint8_t* words, const Layout& layout, Key key, Code code) {
    using Unsigned = std::make_unsigned_t<Word>;
    Unsigned sums[kWordBlock];
    std::uint32_t bits[kWordBlock];
    const int width = layout.width;
    layout.blocks(
        [&](std::size_t word, std::size_t many) HC_HOT {
            for (std::size_t j = 0; j < many; ++j) {
                bits[j] = random_bits(static_cast<std::uint32_t>(word + j), key);
                sums[j] = 0;
            }
        },
        [&](int field, std::size_t, std::size_t first, std::size_t count) HC_HOT {
            const int shift = field * width;
            HC_APART
            for (std::size_t j = 0; j < count; ++j) {
                sums[j] += static_cast<Unsigned>(code(first + j, bits[j])) << shift;
                bits[j] *= kNext;
            }
        },
        [&](std::size_t word, std::size_t many) HC_HOT { std::memcpy(words + word * sizeof(Word), sums, many * sizeof(Word)); });
}

// Hands out the sums of all elements: `decode(first, count, sum)` gets that of element first + j from sum(j). offset: the largest
// magnitude that a sum can have, 0 for sums that are not signed.
template <class Word, class Decode>
HC_INLINE void unpack(const std::uint8_t* words, const Layout& layout, std::uint64_t offset, Decode decode) {
    using Unsigned = std::make_unsigned_t<Word>;
    Unsigned offsets = 0;
    for (int field = 0; field < layout.fields; ++field) offsets += static_cast<Unsigned>(offset) << (field * layout.width);
    const Unsigned mask = static_cast<Unsigned>(~0ull >> (64 - layout.width)), less = static_cast<Unsigned>(offset);
    const int width = layout.width;
    const auto nothing = [](std::size_t, std::size_t) HC_HOT {};
    layout.blocks(
        nothing,
        [&](int field, std::size_t word, std::size_t first, std::size_t count) HC_HOT {
            const int shift = field * width;
            const std::uint8_t* from = words + word * sizeof(Word);
            decode(first, count, [=](std::size_t j) HC_HOT {
                Unsigned its;
                std::memcpy(&its, from + j * sizeof its, sizeof its);
                return static_cast<std::int32_t>(((its + offsets) >> shift & mask) - less);
            });
        },
        nothing);
}

}  // namespace hc
