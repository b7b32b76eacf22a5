// Codes of any width side by side, where no sums of words are needed: not a bit stays free.
//
// A block's elements are 32 rows of 16 columns, and of fewer where fewer are left. The codes of a
// column, `width` bits each, follow each other in `width` words of 32 bits; word k of column c lies
// at k · columns + c. So 16 columns are packed and unpacked at once, each row one vector, with the
// same shifts in all columns; 32 codes of `width` bits fill `width` words exactly. each_drawn hands
// out random bits: 64 a block are drawn, and eight elements that lie 64 apart share a draw.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common.hpp"
#include "random.hpp"

namespace hc {

// The shape of a block, part of the wire format.
constexpr std::size_t kRows = 32, kColumns = kLanes, kBlock = kRows * kColumns;
// Of a block: elements that far apart share one.
constexpr std::size_t kDraws = 64;

inline std::size_t columns_of(std::size_t count) { return (count + kRows - 1) / kRows; }
inline std::size_t blocks_of(std::size_t count) { return (count + kBlock - 1) / kBlock; }
inline std::size_t bytes_of(std::size_t count, int width) { return 4 * columns_of(count) * width; }

// work(first, count) for the elements of each block. Of whole blocks the compiler knows the count.
template <class Work>
HC_INLINE void each_block(std::size_t n, Work work) {
    std::size_t first = 0;
    for (; first + kBlock <= n; first += kBlock) work(first, kBlock);
    if (first < n) work(first, n - first);
}

// code(i, bits) for the elements of a block and random bits.
template <class Code>
HC_INLINE void each_drawn(std::size_t count, std::size_t block, Key key, Code code) {
    const std::size_t draws = std::min(kDraws, count);
    std::uint32_t bits[kDraws];
    for (std::size_t j = 0; j < draws; ++j)
        bits[j] = random_bits(static_cast<std::uint32_t>(block * kDraws + j), key);
    std::size_t first = 0;
    for (; first + kDraws <= count; first += kDraws) {
        HC_APART
        for (std::size_t j = 0; j < kDraws; ++j) {
            code(first + j, bits[j]);
            bits[j] *= kNext;
        }
    }
    for (std::size_t j = 0; first + j < count; ++j) code(first + j, bits[j]);
}

// Of one column, or of as many as there are lanes.
template <class Word, class Width>
HC_INLINE void put_some(const std::uint32_t* from, std::uint8_t* out, std::size_t columns,
                        Width width, std::uint32_t offset) {
    Word word{}, code;
    int filled = 0;
    HC_UNROLL
    for (std::size_t row = 0; row < kRows; ++row) {
        std::memcpy(&code, from + row * columns, sizeof code);
        code += offset;
        word |= code << filled;
        filled += width;
        if (filled < 32) continue;
        std::memcpy(out, &word, sizeof word);
        out += 4 * columns;
        filled -= 32;
        word = code >> (width - filled);
    }
}
template <class Word, class Width>
HC_INLINE void take_some(const std::uint8_t* in, std::uint32_t* to, std::size_t columns,
                         Width width, std::uint32_t offset) {
    const std::uint32_t mask = (1u << width) - 1;
    Word word, code;
    std::memcpy(&word, in, sizeof word);
    int used = 0;
    HC_UNROLL
    for (std::size_t row = 0; row < kRows; ++row) {
        code = word >> used;
        used += width;
        if (used >= 32 && row + 1 < kRows) {
            in += 4 * columns;
            std::memcpy(&word, in, sizeof word);
            used -= 32;
            code |= word << (width - used);
        }
        code = (code & mask) - offset;
        std::memcpy(to + row * columns, &code, sizeof code);
    }
}

// work(width), known to the compiler where it is a frequent one: its shifts are constants then.
template <class Work>
HC_INLINE void of_width(int width, Work work) {
    switch (width) {
        case 2: return work(std::integral_constant<int, 2>());
        case 3: return work(std::integral_constant<int, 3>());
        case 4: return work(std::integral_constant<int, 4>());
        case 5: return work(std::integral_constant<int, 5>());
        case 9: return work(std::integral_constant<int, 9>());
        default: work(width);
    }
}

// A block's codes + offset into its words, and back; both have room for whole columns.
HC_INLINE void put_block(const std::uint32_t* codes, std::uint8_t* out, std::size_t columns,
                         int width, std::uint32_t offset) {
    if (width == 0) return;
    if (columns < kColumns) {
        for (std::size_t c = 0; c < columns; ++c)
            put_some<std::uint32_t>(codes + c, out + 4 * c, columns, width, offset);
        return;
    }
    of_width(width,
             [=](auto known) HC_HOT { put_some<WordLanes>(codes, out, kColumns, known, offset); });
}
HC_INLINE void take_block(const std::uint8_t* in, std::uint32_t* codes, std::size_t columns,
                          int width, std::uint32_t offset) {
    if (width == 0) {
        std::memset(codes, 0, 4 * kRows * columns);
        return;
    }
    if (columns < kColumns) {
        for (std::size_t c = 0; c < columns; ++c)
            take_some<std::uint32_t>(in + 4 * c, codes + c, columns, width, offset);
        return;
    }
    of_width(width,
             [=](auto known) HC_HOT { take_some<WordLanes>(in, codes, kColumns, known, offset); });
}

}  // namespace hc
