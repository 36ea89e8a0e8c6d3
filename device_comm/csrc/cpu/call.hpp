// One collective as a sequence of steps: what a rank writes to its slot, and what it reads from the other slots.
#pragma once

#include <vector>

#include "shared_region.hpp"
#include "../reduce/reduce.hpp"

namespace region {

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

// A tensor's bytes as `rows` rows, of which each rank owns a run of columns: a concatenation along a dimension.
struct Columns {
    size_t rows = 1;
    std::vector<size_t> widths;  // bytes of each rank's run
    std::vector<size_t> starts;  // offset of each rank's run in a row
    size_t row_bytes = 0;        // bytes of a whole row

    void set(size_t row_count, std::vector<size_t> run_bytes) {
        rows = row_count;
        widths = std::move(run_bytes);
        starts.assign(widths.size(), 0);
        row_bytes = 0;
        for (size_t r = 0; r < widths.size(); ++r) {
            starts[r] = row_bytes;
            row_bytes += widths[r];
        }
    }
    size_t bytes_of(uint32_t rank) const { return rows * widths[rank]; }

    // Copies bytes [from, from + bytes) of the columns of `rank`, counted without other columns, into or out of `whole`.
    void put(uint32_t rank, unsigned char* whole, const unsigned char* piece, size_t from, size_t bytes) const;
    void take(uint32_t rank, const unsigned char* whole, unsigned char* piece, size_t from, size_t bytes) const;
};

// All-to-all: offset in a slot, behind the pieces, of a table with the bytes per row that its rank sends to each rank,
// followed by those that it expects from each rank.
inline size_t table_offset(const SharedRegion& region) {
    return region.slot_bytes() - rounded(2 * region.ranks() * sizeof(uint64_t), kLine);
}

// The parameters of a call. `in` and `out` are the caller's contiguous tensors.
struct Plan {
    Kind kind = Kind::kBarrier;
    uint32_t root = 0;
    const unsigned char* in = nullptr;
    unsigned char* out = nullptr;
    size_t bytes = 0;    // of the tensor that is reduced, broadcast or given to each rank
    size_t element = 1;  // bytes of one element, for reductions
    reduce::Kernel kernel = nullptr;
    Columns columns;      // of the tensor that is concatenated or split
    Columns out_columns;  // all-to-all: of the tensor that is received
    View view{};
};

class Call {
public:
    // Prepares a call, to which the rank has come at the time `arrived`, on the clock of the status page. All ranks' plans must
    // have equal views; the first step checks it.
    Call(SharedRegion& region, Plan plan, uint64_t arrived = 0);
    // Continues until the call is done (kDone) or cannot proceed for now. If the ranks' views differ, this
    // returns kDone with `disagrees()` set, and no data has been touched.
    Wait run(uint64_t spin_ns, uint64_t until_ns);
    // For a short call of one step: posts it, polls for some microseconds, and returns whether all ranks have posted.
    // The caller then completes it without releasing the GIL.
    bool is_soon_done();
    // Shows the call in the status page, unless it is shown there; with the GIL held, before `run`.
    void show();
    bool disagrees() const { return disagrees_; }
    // Who came last to this call, and how long this rank waited for it; valid once the first step is complete.
    status::End arrivals() const { return arrivals_; }

private:
    size_t step_bytes() const;
    uint64_t count_steps() const;
    void post();
    void publish();
    void consume();
    bool all_agree();
    bool all_match();
    void compare_arrivals();
    bool has_own_in_slot() const;
    void publish_table();
    void publish_columns();
    void publish_two_shot();
    void consume_two_shot();
    void consume_columns();
    void consume_scattered();
    void consume_exchanged();
    void reduce_to(unsigned char* out, const unsigned char* own, size_t bytes, size_t slot_offset);

    // The part [from, from + length) of `total` bytes that belongs to the current step.
    size_t from() const { return static_cast<size_t>(at_) * chunk_; }
    size_t length(size_t total) const { return from() >= total ? 0 : std::min(chunk_, total - from()); }
    // Two-shot: offset and bytes of the share of `rank` in round `round`.
    size_t share_from(uint64_t round, uint32_t rank) const { return (round * region_.ranks() + rank) * chunk_; }
    size_t share_bytes(uint64_t round, uint32_t rank) const {
        const size_t start = share_from(round, rank);
        return start >= plan_.bytes ? 0 : std::min(chunk_, plan_.bytes - start);
    }

    SharedRegion& region_;
    Plan plan_;
    size_t chunk_ = 0;    // bytes of each piece that one step moves
    uint64_t steps_ = 0;
    uint64_t at_ = 0;     // the current step of the call
    bool is_posted_ = false;
    bool disagrees_ = false;
    bool is_shown_ = false;
    uint64_t arrived_;
    status::End arrivals_;
    std::vector<const void*> inputs_;
};

}  // namespace region
