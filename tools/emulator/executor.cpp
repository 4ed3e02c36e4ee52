// Runs kernels that were compiled with cuda_emu.h: `program CASE RESULT`.
//
// One fiber per CUDA thread, all on one OS thread: fast, repeatable, and a deadlock is seen at once. This file is
// compiled without instrumentation, so that its own bookkeeping is invisible to the sanitizers; what they must
// know (which stack is in use, what orders two threads) it tells them.
#include "cuda_emu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#ifndef __x86_64__
#error "the emulator switches fibers in x86-64 assembly"
#endif

#ifdef EMU_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMU_ASAN(...) __VA_ARGS__
#else
#define EMU_ASAN(...)
#endif
#ifdef EMU_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#define EMU_TSAN(...) __VA_ARGS__
#else
#define EMU_TSAN(...)
#endif

// Saves the registers that a called function must preserve on the stack that is left, then continues on the other.
extern "C" void emu_switch(void** left, void* entered);
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch, . - emu_switch
)");

namespace emu {

// ---------------------------------------------------------------- what a unit registers before main
static std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}
static std::vector<int*>& parameters() {
    static std::vector<int*> all;
    return all;
}
static std::vector<size_t>& static_sizes() {
    static std::vector<size_t> all;
    return all;
}
bool add_kernel(const Kernel& kernel) { return kernels().emplace(kernel.name, kernel).second; }
int add_parameter(int* variable) {
    parameters().push_back(variable);
    return 0;
}
int add_static_shared(size_t bytes) {
    static_sizes().push_back(bytes);
    return static_cast<int>(static_sizes().size()) - 1;
}

// ---------------------------------------------------------------- state of a launch
constexpr int WARP = 32;

struct Barrier {
    int arrived = 0;
    unsigned generation = 0;  // times it opened
    // What TSan orders arrivals before departures by. Two, used in turn: a thread that already arrived at the
    // next opening must not be ordered before one that is only now leaving this one.
    char order[2];
};

struct Meeting : Barrier {    // of the lanes of one mask
    unsigned mask = 0;
};

struct Warp {
    uint64_t mail[WARP] = {};
    unsigned present = 0;     // lanes that exist: the last warp of a block may be partial
    unsigned returned = 0;
    Meeting meetings[WARP];   // by the lowest lane of the mask; masks that do not overlap do not clash
};

struct Block;

struct Thread : Position {
    Block* parent = nullptr;
    Warp* warp = nullptr;
    void* stack_pointer = nullptr;
    int fiber = 0;                     // which stack, and which of TSan's threads
    const unsigned* awaited = nullptr; // blocked until *awaited differs from seen
    unsigned seen = 0;
    const char* waits_at = "";
    int line = 0;                      // where it waits, if that is a __syncthreads
    bool returned = false;
    EMU_ASAN(void* fake_stack = nullptr;)
};

struct Memory {                        // uninitialised bytes that ASan guards
    unsigned char* bytes = nullptr;
    Memory(size_t alignment, size_t size) {
        void* p = nullptr;
        if (posix_memalign(&p, alignment, size ? size : 1)) std::abort();
        bytes = static_cast<unsigned char*>(p);
        EMU_ASAN(if (!size) __asan_poison_memory_region(bytes, 1);)
    }
    Memory(Memory&& other) : bytes(std::exchange(other.bytes, nullptr)) {}
    ~Memory() { std::free(bytes); }
};

struct Launch {
    unsigned grid = 1, block = 1;
    size_t shared = 0;
    bool reverse = false;
    unsigned concurrent = 1;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Memory> shared;        // dynamic, then the static variables
    Barrier barrier;
    int line = 0;                      // of the __syncthreads that threads wait at
    int counts[2] = {0, 0};            // of __syncthreads_count, by generation
    char begin, end;                   // What TSan orders the launch's begin and end by: two, for a thread that
                                       // ends must not be ordered before one that begins later.

    // Shared memory is filled with 0xff (NaN as a float, -1 as an index): a use of what nobody wrote shows up.
    Block(const Launch& launch, unsigned index, int first_fiber)
        : threads(launch.block), warps((launch.block + WARP - 1) / WARP) {
        for (unsigned i = 0; i < launch.block; ++i) {
            Thread& t = threads[i];
            t.thread = make_uint3(i, 0, 0);
            t.block = make_uint3(index, 0, 0);
            t.block_size = dim3(launch.block);
            t.grid_size = dim3(launch.grid);
            t.lane = static_cast<int>(i % WARP);
            t.parent = this;
            t.warp = &warps[i / WARP];
            t.warp->present |= 1u << t.lane;
            t.fiber = first_fiber + static_cast<int>(i);
        }
        shared.reserve(1 + static_sizes().size());
        add_shared(launch.shared);
        for (size_t size : static_sizes()) add_shared(size);
    }
    void add_shared(size_t size) {
        shared.emplace_back(128, size);
        std::memset(shared.back().bytes, 0xff, size);
    }
};

const Position* here = nullptr;
static Thread* running = nullptr;
static void (*body)(void* const*) = nullptr;
static void* const* values = nullptr;
static void* scheduler_stack_pointer = nullptr;
EMU_ASAN(static const void* scheduler_stack = nullptr; static size_t scheduler_stack_size = 0;)
EMU_TSAN(static void* scheduler_fiber = nullptr;)

void fail(const char* what) {
    std::fprintf(stderr, "%s (block %u, thread %u)\n", what, running->block.x, running->thread.x);
    std::fflush(stderr);
    _exit(1);
}

void* dynamic_shared() { return running->parent->shared[0].bytes; }
void* static_shared(int variable) { return running->parent->shared[1 + variable].bytes; }
unsigned warp_active() { return running->warp->present & ~running->warp->returned; }

// ---------------------------------------------------------------- fibers
constexpr size_t STACK = 256 * 1024, GUARD = 4096;

// Stacks, and TSan's threads (0.5 ms each to make), are made once and used again.
static unsigned char* stack_of(int fiber) {
    static std::vector<unsigned char*> all;
    while (static_cast<int>(all.size()) <= fiber) {
        constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK;
        void* p = mmap(nullptr, GUARD + STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (p == MAP_FAILED || mprotect(p, GUARD, PROT_NONE)) std::abort();
        all.push_back(static_cast<unsigned char*>(p) + GUARD);
    }
    return all[fiber];
}
EMU_TSAN(static void* tsan_fiber_of(int fiber) {
    static std::vector<void*> all;
    while (static_cast<int>(all.size()) <= fiber) all.push_back(__tsan_create_fiber(0));
    return all[fiber];
})

static void to_scheduler(bool last) {
    Thread* t = running;
    EMU_ASAN(__sanitizer_start_switch_fiber(last ? nullptr : &t->fake_stack, scheduler_stack, scheduler_stack_size);)
    EMU_TSAN(__tsan_switch_to_fiber(scheduler_fiber, __tsan_switch_to_fiber_no_sync);)
    emu_switch(&t->stack_pointer, scheduler_stack_pointer);
    EMU_ASAN(__sanitizer_finish_switch_fiber(t->fake_stack, nullptr, nullptr);)
    (void)last;
}

static void to_fiber(Thread& t) {
    here = running = &t;
    EMU_ASAN(void* fake_stack = nullptr; __sanitizer_start_switch_fiber(&fake_stack, stack_of(t.fiber), STACK);)
    EMU_TSAN(__tsan_switch_to_fiber(tsan_fiber_of(t.fiber), __tsan_switch_to_fiber_no_sync);)
    emu_switch(&scheduler_stack_pointer, t.stack_pointer);
    EMU_ASAN(__sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);)
}

static void fiber_main() {
    EMU_ASAN(__sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);)
    EMU_TSAN(__tsan_acquire(&running->parent->begin);)  // released by start(): all that came before
    body(values);
    EMU_TSAN(__tsan_release(&running->parent->end);)  // acquired when the group is done
    running->returned = true;
    running->warp->returned |= 1u << running->lane;
    to_scheduler(true);
}

static void start(Block& b) {
    for (Thread& t : b.threads) {
        // What emu_switch pops: six registers (frame pointer 0 ends a backtrace) and its return address; then the
        // return address of fiber_main, which has none.
        void** top = reinterpret_cast<void**>(stack_of(t.fiber) + STACK) - 8;
        std::fill(top, top + 8, nullptr);
        top[6] = reinterpret_cast<void*>(&fiber_main);
        t.stack_pointer = top;
        EMU_TSAN(tsan_fiber_of(t.fiber);)
    }
    EMU_TSAN(__tsan_release(&b.begin);)
}

// ---------------------------------------------------------------- barriers
// Waits until `count` threads arrived; the last one runs `open`. Only where `orders_memory` may a thread rely on
// what the others wrote before.
template <class Open>
static void pass(Barrier& barrier, int count, bool orders_memory, const char* place, int line, Open open) {
    EMU_TSAN(char* order = &barrier.order[barrier.generation & 1];)
    EMU_TSAN(if (orders_memory) __tsan_release(order);)
    (void)orders_memory;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        open();
        ++barrier.generation;
    } else {
        Thread& t = *running;
        t.awaited = &barrier.generation;
        t.seen = barrier.generation;
        t.waits_at = place;
        t.line = line;
        to_scheduler(false);
        t.awaited = nullptr;
    }
    EMU_TSAN(if (orders_memory) __tsan_acquire(order);)
}

int block_count(int predicate, int line) {
    Block& b = *running->parent;
    if (b.barrier.arrived && b.line != line) {
        const std::string lines = std::to_string(b.line) + " and " + std::to_string(line);
        fail(("threads of one block meet at different __syncthreads, lines " + lines).c_str());
    }
    b.line = line;
    const unsigned generation = b.barrier.generation;
    b.counts[generation & 1] += predicate;
    // When a barrier opens, everybody has read the count of the one before.
    pass(b.barrier, static_cast<int>(b.threads.size()), true, "__syncthreads", line,
         [&] { b.counts[~generation & 1] = 0; });
    return b.counts[generation & 1];
}
void block_barrier(int line) { block_count(0, line); }

static void meet(unsigned mask, bool orders_memory) {
    Warp& w = *running->warp;
    mask &= w.present;
    if (!(mask >> running->lane & 1)) fail("a lane calls a warp intrinsic whose mask leaves it out");
    if (mask & w.returned) fail("a warp intrinsic waits for a lane that has returned");
    Meeting& meeting = w.meetings[std::countr_zero(mask)];
    if (meeting.arrived && meeting.mask != mask) fail("lanes meet at one warp intrinsic with different masks");
    meeting.mask = mask;
    pass(meeting, std::popcount(mask), orders_memory, "a warp intrinsic", 0, [] {});
}
void warp_barrier(unsigned mask) { meet(mask, true); }
unsigned warp_exchange(unsigned mask, uint64_t value, uint64_t (&received)[32]) {
    Warp& w = *running->warp;
    w.mail[running->lane] = value;
    meet(mask, false);
    std::copy_n(w.mail, WARP, received);
    meet(mask, false);  // nobody posts again while a lane still copies
    return mask & w.present;
}

// ---------------------------------------------------------------- running a launch
[[noreturn]] static void deadlock(const Block& b) {
    std::map<std::string, std::vector<unsigned>> places;
    for (const Thread& t : b.threads) {
        std::string place = t.returned ? "returned" : "wait at " + std::string(t.waits_at);
        if (!t.returned && t.line) place += " in line " + std::to_string(t.line);
        places[place].push_back(t.thread.x);
    }
    std::string text = "deadlock in block " + std::to_string(b.threads[0].block.x) + ":";
    for (const auto& [place, threads] : places) {
        const std::string first = " threads (first: " + std::to_string(threads[0]) + ") ";
        text += " " + std::to_string(threads.size()) + first + place + ";";
    }
    text.back() = '\n';
    std::fputs(text.c_str(), stderr);
    std::exit(1);
}

static void run(Block& b, bool reverse) {
    for (size_t left = b.threads.size(); left;) {
        bool ran = false;
        for (size_t i = 0; i < b.threads.size(); ++i) {
            Thread& t = b.threads[reverse ? b.threads.size() - 1 - i : i];
            if (t.returned || (t.awaited && *t.awaited == t.seen)) continue;
            ran = true;
            to_fiber(t);
            left -= t.returned;
        }
        if (!ran) deadlock(b);
    }
}

// Blocks run one after another. Those of one group of `concurrent` are not ordered among each other for TSan.
static void run(const Launch& launch) {
    EMU_TSAN(scheduler_fiber = __tsan_get_current_fiber();)
    for (unsigned first = 0; first < launch.grid; first += launch.concurrent) {
        const unsigned size = std::min(launch.concurrent, launch.grid - first);
        std::vector<std::unique_ptr<Block>> group;
        for (unsigned i = 0; i < size; ++i) {
            const unsigned index = launch.reverse ? launch.grid - 1 - (first + i) : first + i;
            group.push_back(std::make_unique<Block>(launch, index, static_cast<int>(i * launch.block)));
            start(*group.back());
        }
        for (auto& b : group) run(*b, launch.reverse);
        EMU_TSAN(for (auto& b : group) __tsan_acquire(&b->end);)
    }
}

// ---------------------------------------------------------------- the program
// CASE holds little-endian 64-bit words; texts and bytes follow their length, padded to whole words:
//   kernel name; arrays: count, then bytes of each; launches: count, then for each
//     grid, block, shared bytes, reverse, concurrent, misalign;
//     parameters: count, then values; arguments: count, then kind: 0 and bytes of a scalar, or 1 and index of an array.
// RESULT receives the number of the launch that is running and, at the end, the bytes of all arrays.
struct Reader {
    FILE* file;
    uint64_t word() {
        uint64_t value;
        bytes(&value, sizeof value);
        return value;
    }
    void bytes(void* to, size_t size) {
        if (size && std::fread(to, 1, size, file) != size) quit("the case is cut short");
    }
    std::string text() {
        std::string result(word(), '\0');
        char padding[8];
        bytes(result.data(), result.size());
        bytes(padding, -result.size() % 8);
        return result;
    }
    [[noreturn]] static void quit(const std::string& why) {
        std::fprintf(stderr, "%s\n", why.c_str());
        std::exit(1);
    }
};

static void run_case(Reader& in, FILE* out) {
    const std::string name = in.text();
    const Kernel& kernel = kernels().at(name);
    std::vector<std::string> arrays(in.word());
    for (std::string& array : arrays) array = in.text();

    const uint64_t launches = in.word();
    for (uint64_t number = 0; number < launches; ++number) {
        std::rewind(out);
        std::fwrite(&number, sizeof number, 1, out);
        std::fflush(out);

        Launch launch;
        launch.grid = static_cast<unsigned>(in.word());
        launch.block = static_cast<unsigned>(in.word());
        launch.shared = in.word();
        launch.reverse = in.word();
        launch.concurrent = static_cast<unsigned>(in.word());
        const size_t misalign = in.word();
        if (in.word() != parameters().size()) Reader::quit("wrong number of parameters");
        for (int* parameter : parameters()) *parameter = static_cast<int>(in.word());

        // Every array becomes memory of exactly its size. What a misaligned one leaves free in front of it is
        // poisoned, as far as ASan's unit of 8 bytes allows.
        if (in.word() != static_cast<uint64_t>(kernel.argument_count))
            Reader::quit(name + " takes " + std::to_string(kernel.argument_count) + " arguments");
        std::vector<std::string> scalars(kernel.argument_count);
        std::map<uint64_t, Memory> memory;
        std::vector<void*> pointers(kernel.argument_count), addresses(kernel.argument_count);
        for (int i = 0; i < kernel.argument_count; ++i) {
            const std::string which = "argument " + std::to_string(i) + " of " + name;
            const bool is_array = in.word();
            if (is_array != kernel.arguments[i].pointer)
                Reader::quit(which + (is_array ? " is no pointer" : " is a pointer"));
            if (is_array) {
                const uint64_t index = in.word();
                const std::string& array = arrays[index];
                auto [place, added] = memory.try_emplace(index, 16, array.size() ? misalign + array.size() : 0);
                unsigned char* begin = place->second.bytes + (array.size() ? misalign : 0);
                if (added) {
                    std::memcpy(begin, array.data(), array.size());
                    EMU_ASAN(if (array.size()) __asan_poison_memory_region(place->second.bytes, misalign);)
                }
                pointers[i] = begin;
                addresses[i] = &pointers[i];
            } else {
                scalars[i] = in.text();
                const size_t given = scalars[i].size(), wanted = kernel.arguments[i].bytes;
                if (given != wanted)
                    Reader::quit(which + " has " + std::to_string(wanted) + " bytes, not " + std::to_string(given));
                scalars[i].reserve(64);  // on the heap, aligned for every type
                addresses[i] = scalars[i].data();
            }
        }
        const int bound = kernel.max_threads();
        if (bound && launch.block > static_cast<unsigned>(bound)) {
            const std::string bounds = "__launch_bounds__(" + std::to_string(bound) + ")";
            Reader::quit("a block of " + std::to_string(launch.block) + " threads exceeds " + bounds);
        }

        body = kernel.call;
        values = addresses.data();
        run(launch);
        for (auto& [index, block] : memory) {
            std::string& array = arrays[index];
            if (array.size()) std::memcpy(array.data(), block.bytes + misalign, array.size());
        }
    }
    for (const std::string& array : arrays) std::fwrite(array.data(), 1, array.size(), out);
}

}  // namespace emu

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    FILE* in = std::fopen(argv[1], "rb");
    FILE* out = std::fopen(argv[2], "wb");
    if (!in || !out) return 2;
    emu::Reader reader{in};
    emu::run_case(reader, out);
    return std::fclose(out) ? 2 : 0;
}
