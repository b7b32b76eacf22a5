// Elias' code of levels, most of them small: for each that is not 0 the gamma code of the zeros
// before it plus 1, a sign bit, the gamma code of its magnitude.
//
// Writing looks up four levels at a time in a table (Groups), by their values in 3 bits each: one
// look gives their code, all but that of the gap before the first, which depends on the zeros
// before and comes from a second table. Reading looks up the next 11 bits in a table (Runs): one
// look gives the whole entries in them, as up to 8 levels that are stored at once. What is large or
// far apart goes one by one. Tables are made when the module is loaded.
#pragma once

#include <cstdlib>

#include "bits.hpp"
#include "columns.hpp"

namespace hc {

HC_INLINE int log2_of(std::uint64_t n) { return 63 - __builtin_clzll(n); }

// Up to 64 bits of a stream, the first one lowest.
struct Code {
    std::uint64_t code = 0, bits = 0;
    HC_INLINE void append(const Code& more) {
        code |= more.code << bits;
        bits += more.bits;
    }
};
// The gamma code of n ≥ 1: as many ones as n has bits after the first, a zero, those bits.
HC_INLINE Code gamma_of(std::uint64_t n) {
    const int more = log2_of(n);
    return {((1ull << more) - 1) | (n ^ 1ull << more) << (more + 1),
            2 * static_cast<std::uint64_t>(more) + 1};
}
// Sign and magnitude of a level that is not 0.
HC_INLINE Code signed_gamma_of(std::int32_t level) {
    const Code size = gamma_of(static_cast<std::uint64_t>(std::abs(level)));
    return {(level < 0) | size.code << 1, size.bits + 1};
}

// The codes of all groups of levels between -kSmall and kSmall, each but for the gap before its
// first level that is not 0. The code of that is looked up by the number of zeros, those before the
// group included.
class Groups {
  public:
    static constexpr int kGroup = tuning::kEliasGroup, kSmall = tuning::kEliasSmall,
                         kNear = tuning::kEliasNear;
    static constexpr int kLarge = kSmall + 1, kNoLevel = kNear + kGroup, kNotCoded = 255;
    struct Group {
        std::uint32_t code;
        // Zeros before its first level that is not 0, or kNoLevel, or kNotCoded; and after its
        // last.
        std::uint8_t bits, lead, tail;
        bool empty;  // all are 0
    };
    // By levels in two's complement of 3 bits, kLarge for one that is larger.
    Group groups[1 << 3 * kGroup];
    Code gaps[kNoLevel + kNear];  // by zeros; nothing from kNoLevel on

    Groups() {
        for (int zeros = 0; zeros < kNoLevel; ++zeros)
            gaps[zeros] = gamma_of(static_cast<std::uint64_t>(zeros + 1));
        for (int index = 0; index < 1 << 3 * kGroup; ++index) {
            Code code;
            int lead = kNoLevel, zeros = 0;
            bool large = false;
            for (int j = 0; j < kGroup; ++j, ++zeros) {
                const int field = index >> 3 * j & 7, level = field < kLarge ? field : field - 8;
                large |= field == kLarge;
                if (level == 0) continue;
                if (lead == kNoLevel) lead = zeros;
                else code.append(gaps[zeros]);
                code.append(signed_gamma_of(level));
                zeros = -1;
            }
            groups[index] = {static_cast<std::uint32_t>(code.code),
                             static_cast<std::uint8_t>(code.bits),
                             static_cast<std::uint8_t>(large ? kNotCoded : lead),
                             static_cast<std::uint8_t>(zeros), lead == kNoLevel};
        }
    }
};
inline const Groups kGroups;

// What codes of at most 56 bits are appended to: a stream, or only a count of bits.
class BitStream {
  public:
    // Bytes behind `end` that may be written to: what comes with one group of levels.
    static constexpr std::size_t kSlack = 64;

    BitStream(std::uint8_t* out, const std::uint8_t* end) : begin_(out), out_(out), end_(end) {}
    // Whole bytes leave, fewer than 8 bits stay.
    HC_INLINE void append(const Code& code) {
        word_ |= code.code << filled_;
        std::memcpy(out_, &word_, 8);
        filled_ += code.bits;
        out_ += filled_ >> 3;
        word_ >>= filled_ & ~7ull;
        filled_ &= 7;
    }
    std::uint64_t bits() const { return 8 * static_cast<std::uint64_t>(out_ - begin_) + filled_; }
    bool full() const { return out_ >= end_; }

  private:
    std::uint8_t *begin_, *out_;
    const std::uint8_t* end_;
    std::uint64_t word_ = 0, filled_ = 0;
};
class BitCount {
  public:
    HC_INLINE void append(const Code& code) { bits_ += code.bits; }
    std::uint64_t bits() const { return bits_; }
    bool full() const { return false; }

  private:
    std::uint64_t bits_ = 0;
};

template <class Out>
class EliasCoder {
  public:
    Out out;
    std::uint32_t entries = 0;

    explicit EliasCoder(Out to = Out()) : out(to) {}

    // Appends levels, until `out` is full; behind them in memory, zeros fill up the last group.
    HC_INLINE void put(const std::int32_t* levels, std::size_t count) {
        each_block(count, [&](std::size_t first, std::size_t some)
                              HC_HOT { put_some(levels + first, some); });
    }

  private:
    HC_INLINE void put_some(const std::int32_t* levels, std::size_t count) {
        constexpr std::size_t group = Groups::kGroup;
        const std::size_t groups = (count + group - 1) / group;
        std::uint8_t fields[kBlock];
        std::uint32_t found = 0, indices[kBlock / group];
        for (std::size_t j = 0; j < groups * group; ++j) {
            const std::int32_t level = levels[j];
            fields[j] = static_cast<std::uint8_t>(std::abs(level) > Groups::kSmall ? Groups::kLarge
                                                                                   : level & 7);
            found += level != 0;
        }
        // Three bits of each of four bytes, side by side.
        for (std::size_t i = 0; i < groups; ++i) {
            std::uint32_t word;
            std::memcpy(&word, fields + group * i, 4);
            word = (word | word >> 5) & 0x003f003f;
            indices[i] = (word | word >> 10) & 0xfff;
        }
        entries += found;
        // Which, unlike this one, nobody else can see: it stays in registers.
        EliasCoder local = *this;
        for (std::size_t i = 0; i < groups && !local.out.full(); ++i) {
            const Groups::Group& codes = kGroups.groups[indices[i]];
            if (codes.lead == Groups::kNotCoded || local.zeros_ >= Groups::kNear) {
                for (std::size_t j = 0; j < group; ++j) local.put_one(levels[group * i + j]);
                continue;
            }
            Code code = kGroups.gaps[local.zeros_ + codes.lead];
            code.append({codes.code, codes.bits});
            local.out.append(code);
            local.zeros_ = codes.tail + local.zeros_ * codes.empty;
        }
        local.zeros_ -= groups * group - count;
        *this = local;
    }
    HC_INLINE void put_one(std::int32_t level) {
        if (level == 0) {
            ++zeros_;
            return;
        }
        const Code gap = gamma_of(zeros_ + 1);
        // The whole may be more than fits at once.
        const std::uint64_t half = gap.bits / 2;
        out.append({gap.code & ((1ull << half) - 1), half});
        out.append({gap.code >> half, gap.bits - half});
        out.append(signed_gamma_of(level));
        zeros_ = 0;
    }

    std::uint64_t zeros_ = 0;  // since the last level that is not 0
};

// One level that is not 0, where it is `gap` levels behind the last one.
struct Entry {
    std::uint64_t gap, level;
    bool minus;
    std::uint32_t bits;
};
// Bits: of an entry that has more, only that is known.
constexpr std::uint32_t kShort = 56;

HC_INLINE Entry entry_in(std::uint64_t word) {
    const int wide = __builtin_ctzll(~word | 1ull << 63);
    const std::uint64_t rest = wide < 13 ? word >> (2 * wide + 1) : ~0ull;
    const int high = __builtin_ctzll(~(rest >> 1) | 1ull << 62);
    const std::uint32_t bits = 2 * static_cast<std::uint32_t>(wide + high) + 3;
    if (bits > kShort) return {0, 0, false, bits};
    return {1ull << wide | (word >> (wide + 1) & ((1ull << wide) - 1)),
            1ull << high | (rest >> (high + 2) & ((1ull << high) - 1)), (rest & 1) != 0, bits};
}
inline Entry take_entry(BitReader& reader) {
    Entry entry = entry_in(reader.peek());
    if (entry.bits <= kShort) {
        reader.skip(static_cast<int>(entry.bits));
        return entry;
    }
    const auto gamma = [&] {
        const int bits = static_cast<int>(reader.ones(31));
        return 1ull << bits | reader.take(bits);
    };
    entry.gap = gamma();
    entry.minus = reader.take(1) != 0;
    entry.level = gamma();
    return entry;
}

// The whole entries in any kLook bits, as far as their levels are among kSpan from the first that
// is not 0.
class Runs {
  public:
    // An entry has 3 bits at least.
    static constexpr int kLook = tuning::kEliasLook, kSpan = tuning::kEliasSpan, kMost = kLook / 3;
    static constexpr int kReach = (1 << kLook / 2) + kSpan;  // levels that it may go past
    struct Size {
        // The largest level highest, so that words compare as those do.
        std::uint32_t word;
        Size() = default;
        Size(std::uint32_t bits, std::uint32_t entries, std::uint32_t levels, std::uint32_t lead,
             std::uint32_t largest)
            : word(bits | entries << 6 | levels << 8 | lead << 16 | largest << 24) {}
        HC_INLINE int bits() const { return static_cast<int>(word & 63); }
        HC_INLINE std::size_t entries() const { return word >> 6 & 3; }
        HC_INLINE std::size_t levels() const { return word >> 8 & 0xff; }
        HC_INLINE std::size_t lead() const { return word >> 16 & 0xff; }  // zeros before the first
        HC_INLINE int largest() const { return static_cast<int>(word >> 24); }
    };
    Size sizes[1 << kLook];
    std::int8_t levels[1 << kLook][kSpan] = {};

    Runs() {
        for (std::uint32_t look = 0; look < 1u << kLook; ++look) {
            std::uint32_t bits = 0, entries = 0, count = 0, lead = 0, largest = 0;
            for (;; ++entries) {
                const Entry entry = entry_in(look >> bits);
                const auto gap = static_cast<std::uint32_t>(entry.gap),
                           level = static_cast<std::uint32_t>(entry.level);
                if (bits + entry.bits > kLook || (entries > 0 && count + gap > lead + kSpan)) break;
                if (entries == 0) lead = gap - 1;
                bits += entry.bits;
                count += gap;
                largest = std::max(largest, level);
                levels[look][count - 1 - lead] =
                    static_cast<std::int8_t>(entry.minus ? -level : level);
            }
            sizes[look] = Size(bits, entries, count, lead, largest);
        }
    }
};
inline const Runs kRuns;

using Level = std::int16_t;

// Reads n levels from a stream of `entries`. Behind them there is room for kReach more.
HC_INLINE void read_elias(const std::uint8_t* in, const std::uint8_t* end, std::uint32_t entries,
                          std::size_t n, int steps, Level* levels) {
    using Narrow = std::int8_t __attribute__((vector_size(Runs::kSpan)));
    using Wide = Level __attribute__((vector_size(sizeof(Level) * Runs::kSpan)));
    constexpr std::size_t looks = 57 / Runs::kLook;  // in the bits that are there at once
    BitReader reader(in, end);
    std::size_t next = 0, left = entries;
    Runs::Size size{}, largest{};
    std::memset(levels, 0, n * sizeof *levels);
    while (left > 0) {
        while (left >= looks * Runs::kMost && n - next >= looks * Runs::kReach) {
            std::uint64_t word = reader.peek();
            int bits = 0;
            HC_UNROLL
            for (std::size_t look = 0; look < looks; ++look) {
                const std::size_t index = word & ((1u << Runs::kLook) - 1);
                size = kRuns.sizes[index];
                Narrow some;
                std::memcpy(&some, kRuns.levels[index], sizeof some);
                const Wide widened = __builtin_convertvector(some, Wide);
                std::memcpy(levels + next + size.lead(), &widened, sizeof widened);
                word >>= size.bits();
                bits += size.bits();
                next += size.levels();
                left -= size.entries();
                largest.word = std::max(largest.word, size.word);
            }
            reader.skip(bits);
            if (size.entries() == 0) break;
        }
        if (left == 0) break;
        const Entry entry = take_entry(reader);
        if (entry.gap > n - next) throw std::invalid_argument("index outside the tensor");
        if (entry.level > static_cast<std::uint64_t>(steps))
            throw std::invalid_argument("level out of range");
        next += entry.gap;
        levels[next - 1] = static_cast<Level>(entry.minus ? -static_cast<int>(entry.level)
                                                          : static_cast<int>(entry.level));
        --left;
    }
    reader.finish();
    if (largest.largest() > steps) throw std::invalid_argument("level out of range");
}

}  // namespace hc
