// Integer codes of a few bits side by side in words that ranks can add up.
//
// Layout says how many fields a word has and where elements go: by blocks of 64 words, of which one
// field after the other is filled, so that vectors of elements go into vectors of words. pack and
// pack_random keep a block's words in an array of 64 while they are filled, and then store them:
// elements are read and words written as one stream each. unpack hands each field's number straight
// to what uses it.
//
// Counts and Chosen are the second array of words where there are several scales: how many ranks
// say that an element fits a finer one.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "common.hpp"
#include "random.hpp"

namespace hc {

// Words of a block, part of the wire format: a few vectors, and memory is read as one stream.
constexpr std::size_t kWordBlock = 64;

// Elements go to words by blocks: of the elements for a block of words, the first of each word come
// first, then the second …, so whole vectors of elements go into whole vectors of words. Words have
// 32 bits, and 64 where those hold over a tenth more. `spare` bits at the top stay free.
struct Layout {
    std::size_t n, words;
    int width, fields;
    bool wide;
    Layout(std::size_t count, int field_width, int spare) : n(count), width(field_width) {
        if (width < 1 || width > 64 - spare)
            throw std::invalid_argument("a field has 1 to 64 bits");
        const int in_32 = (32 - spare) / width, in_64 = (64 - spare) / width;
        wide = 10 * in_64 > 22 * in_32;
        fields = wide ? in_64 : in_32;
        words = (n + fields - 1) / fields;
    }

    // For each block of words: begin(word, many), work(field, word, first, count) for the elements
    // of each field, done(word, many). Of whole blocks the compiler knows many and count.
    template <class Begin, class Work, class Done>
    HC_INLINE void blocks(Begin begin, Work work, Done done) const {
        std::size_t word = 0;
        for (; (word + kWordBlock) * fields <= n; word += kWordBlock) {
            begin(word, kWordBlock);
            for (int field = 0; field < fields; ++field)
                work(field, word, word * fields + field * kWordBlock, kWordBlock);
            done(word, kWordBlock);
        }
        const std::size_t many = words - word;
        begin(word, many);
        for (std::size_t field = 0, first = word * fields; first < n; ++field, first += many)
            work(static_cast<int>(field), word, first, std::min(many, n - first));
        done(word, many);
    }
};

// Words of codes: `encode(first, count, put)` calls put(j, code) for element first + j, j below
// count. Signed codes borrow from the fields above; the sum of words is then the word of the sums,
// and no addition leaves the range of a signed word.
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
            encode(first, count, [&](std::size_t j, std::int32_t code) HC_HOT {
                sums[j] += static_cast<Unsigned>(code) << shift;
            });
        },
        [&](std::size_t word, std::size_t many)
            HC_HOT { std::memcpy(words + word * sizeof(Word), sums, many * sizeof(Word)); });
}

// Words of codes that are rounded at random: `encode(first, count, each)` calls each(code) once,
// which takes code(j, bits) for element first + j, j below count; the fields of a word share a
// draw.
template <class Word, class Encode>
HC_INLINE void pack_random(std::uint8_t* words, const Layout& layout, Key key, Encode encode) {
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
            encode(first, count, [&](auto code) HC_HOT {
                HC_APART
                for (std::size_t j = 0; j < count; ++j) {
                    sums[j] += static_cast<Unsigned>(code(j, bits[j])) << shift;
                    bits[j] *= kNext;
                }
            });
        },
        [&](std::size_t word, std::size_t many)
            HC_HOT { std::memcpy(words + word * sizeof(Word), sums, many * sizeof(Word)); });
}

// Hands out the sums of all elements: `decode(first, count, sum)` gets that of element first + j
// from sum(j). offset: the largest magnitude that a sum can have, 0 for sums that are not signed.
template <class Word, class Decode>
HC_INLINE void unpack(const std::uint8_t* words, const Layout& layout, std::uint64_t offset,
                      Decode decode) {
    using Unsigned = std::make_unsigned_t<Word>;
    Unsigned offsets = 0;
    for (int field = 0; field < layout.fields; ++field)
        offsets += static_cast<Unsigned>(offset) << (field * layout.width);
    const Unsigned mask = static_cast<Unsigned>(~0ull >> (64 - layout.width)),
                   less = static_cast<Unsigned>(offset);
    const int width = layout.width;
    layout.blocks(
        [=](std::size_t word, std::size_t many)
            HC_HOT { prefetch_ahead(words + word * sizeof(Word), many * sizeof(Word)); },
        [&](int field, std::size_t word, std::size_t first, std::size_t count) HC_HOT {
            const int shift = field * width;
            const std::uint8_t* from = words + word * sizeof(Word);
            decode(first, count, [=](std::size_t j) HC_HOT {
                Unsigned sums;
                std::memcpy(&sums, from + j * sizeof sums, sizeof sums);
                return static_cast<std::int32_t>(((sums + offsets) >> shift & mask) - less);
            });
        },
        [](std::size_t, std::size_t) HC_HOT {});
}

// Words of counts up to `full`, for each of several scales but the first: how many ranks say that
// an element fits it.
struct Counts {
    const std::uint8_t* words;
    Layout layout;
    std::uint64_t full;
    int scales;
};

// Each element's own of several numbers, one a scale: the first, or that of the last scale that it
// fits on all ranks. They are handed out in order.
class Chosen {
  public:
    Chosen(const Counts& counts, const float* numbers)
        : counts_(counts), numbers_(numbers), many_(many_from(0)) {}

    // Of the next `count` elements, at most kWordBlock: calls use(number), in which number(j) is
    // that of element j.
    template <class Use>
    HC_INLINE void next(std::size_t count, Use use) {
        if (counts_.scales == 2 && !counts_.layout.wide && count == kWordBlock && count == many_ &&
            at_ == 0) {
            // The usual case, for which they are looked up where they are used.
            const std::uint8_t* from = words<std::uint32_t>(1);
            if (field_ == 0) prefetch_ahead(from, count * sizeof(std::uint32_t));
            const int shift = field_ * counts_.layout.width;
            const auto mask = mask_of<std::uint32_t>() << shift,
                       full = static_cast<std::uint32_t>(counts_.full) << shift;
            const float fitting = numbers_[1], otherwise = numbers_[0];
            skip(count);
            return use([=](std::size_t j) HC_HOT {
                std::uint32_t word;
                std::memcpy(&word, from + j * sizeof word, sizeof word);
                return (word & mask) == full ? fitting : otherwise;
            });
        }
        float chosen[kWordBlock];
        for (std::size_t done = 0; done < count;) {
            const std::size_t some = std::min(count - done, many_ - at_);
            for (int scale = 1; scale < counts_.scales; ++scale) {
                if (counts_.layout.wide) look_up<std::uint64_t>(scale, some, chosen + done);
                else look_up<std::uint32_t>(scale, some, chosen + done);
            }
            skip(some);
            done += some;
        }
        use([&](std::size_t j) HC_HOT { return chosen[j]; });
    }

  private:
    std::size_t many_from(std::size_t word) const {
        const Layout& layout = counts_.layout;
        return (word + kWordBlock) * layout.fields <= layout.n ? kWordBlock : layout.words - word;
    }
    // Where the counts of the next elements are.
    template <class Word>
    HC_INLINE const std::uint8_t* words(int scale) const {
        return counts_.words + ((scale - 1) * counts_.layout.words + word_ + at_) * sizeof(Word);
    }
    template <class Word>
    HC_INLINE Word mask_of() const {
        return static_cast<Word>(~0ull >> (64 - counts_.layout.width));
    }
    HC_INLINE void skip(std::size_t count) {
        at_ += count;
        if (at_ < many_) return;
        at_ = 0;
        if (++field_ < counts_.layout.fields) return;
        field_ = 0;
        word_ += many_;
        many_ = many_from(word_);
    }
    template <class Word>
    HC_INLINE void look_up(int scale, std::size_t count, float* out) const {
        const std::uint8_t* from = words<Word>(scale);
        const int shift = field_ * counts_.layout.width;
        const Word mask = mask_of<Word>(), full = static_cast<Word>(counts_.full);
        const float fitting = numbers_[scale], otherwise = numbers_[0];
        for (std::size_t j = 0; j < count; ++j) {
            Word word;
            std::memcpy(&word, from + j * sizeof word, sizeof word);
            out[j] = (word >> shift & mask) == full ? fitting : scale == 1 ? otherwise : out[j];
        }
    }

    const Counts counts_;
    const float* const numbers_;
    // Of the block that the next element is in: its first word, how many words, how many are done.
    std::size_t word_ = 0, many_, at_ = 0;
    int field_ = 0;
};

}  // namespace hc
