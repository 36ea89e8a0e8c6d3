// One collective as a sequence of steps: what a rank puts into its slot, and what it takes out of the others'.
#pragma once

#include <vector>

#include "fabric.hpp"
#include "reduce.hpp"

namespace fabric {

enum class Kind : uint8_t {
    kBarrier,
    kAllReduceOneShot,
    kAllReduceTwoShot,
    kReduceScatter,
    kAllGather,
    kBroadcast,
    kGather,
    kScatter,
    kAllToAll,
    kReduce,
};

// A tensor's bytes as `rows` rows of which each rank owns a run of columns: what is concatenated along a dimension.
struct Columns {
    size_t rows = 1;
    std::vector<size_t> widths;  // of each rank's run, in bytes
    std::vector<size_t> starts;  // of each rank's run in a row
    size_t row_bytes = 0;        // of a whole row

    void set(size_t row_count, const std::vector<size_t>& run_bytes) {
        rows = row_count;
        widths = run_bytes;
        starts.assign(run_bytes.size(), 0);
        row_bytes = 0;
        for (size_t r = 0; r < run_bytes.size(); ++r) {
            starts[r] = row_bytes;
            row_bytes += run_bytes[r];
        }
    }
    size_t bytes_of(uint32_t rank) const { return rows * widths[rank]; }

    // Copies [from, from + bytes) of what `rank` owns, counted without the others' columns, to and from the whole.
    void put(uint32_t rank, unsigned char* whole, const unsigned char* piece, size_t from, size_t bytes) const;
    void take(uint32_t rank, const unsigned char* whole, unsigned char* piece, size_t from, size_t bytes) const;
};

// All-to-all: where in a slot, behind the pieces, its rank says how many bytes of each row it sends to each rank, and
// then how many it expects from each.
inline size_t table_offset(const Fabric& fabric) {
    return fabric.slot_bytes() - rounded(2 * fabric.ranks() * sizeof(uint64_t), kLine);
}

// What a call does; `in` and `out` are the caller's tensors, contiguous.
struct Plan {
    Kind kind = Kind::kBarrier;
    uint32_t root = 0;
    const unsigned char* in = nullptr;
    unsigned char* out = nullptr;
    size_t bytes = 0;    // of the tensor that is reduced, broadcast or given to each rank
    size_t element = 1;  // bytes of one element, for reductions
    reduce::Kernel kernel = nullptr;
    Columns columns;      // of what is concatenated or split
    Columns out_columns;  // of what is received where it differs: all-to-all
    View view{};
};

class Call {
public:
    // Begins a call. Every rank's plan must agree in `view`; that is checked when they meet in the first step.
    Call(Fabric& fabric, Plan plan);
    // Goes on until the call is done (kDone) or cannot be for now. kDone with `disagrees()` when views differ:
    // then nothing was touched.
    Wait run(uint64_t spin_ns, uint64_t until_ns);
    // Posts the first step and polls for a moment: whether all ranks have come to a call that has no more to do than they
    // can wait for.
    bool is_soon_done();
    bool disagrees() const { return disagrees_; }

private:
    size_t step_bytes() const;
    uint64_t count_steps() const;
    void post();
    void publish();
    void consume();
    bool all_agree();
    bool all_match();
    bool has_own_in_slot() const;
    void publish_table();
    void publish_columns();
    void publish_two_shot();
    void consume_two_shot();
    void consume_columns();
    void consume_scattered();
    void consume_exchanged();
    void reduce_to(unsigned char* out, const unsigned char* own, size_t bytes, size_t slot_offset);

    // The part [from, from + length) of `total` bytes that belongs to the present step.
    size_t from() const { return static_cast<size_t>(at_) * chunk_; }
    size_t length(size_t total) const { return from() >= total ? 0 : std::min(chunk_, total - from()); }
    // Two-shot: where the share of `rank` in round `round` begins, and its bytes.
    size_t share_from(uint64_t round, uint32_t rank) const { return (round * fabric_.ranks() + rank) * chunk_; }
    size_t share_bytes(uint64_t round, uint32_t rank) const {
        const size_t start = share_from(round, rank);
        return start >= plan_.bytes ? 0 : std::min(chunk_, plan_.bytes - start);
    }

    Fabric& fabric_;
    Plan plan_;
    size_t chunk_ = 0;    // bytes of each piece that one step moves
    uint64_t steps_ = 0;
    uint64_t at_ = 0;     // the present step of the call
    bool is_posted_ = false;
    bool disagrees_ = false;
    std::vector<const void*> inputs_;
};

}  // namespace fabric
