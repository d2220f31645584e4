// 3x3 convolutions of 64 channels over 32x32 places, for Hopper. What for: small_conv.py, which also writes what comes
// before this: u32, u64 and `multiply`, and whether the input is NORMED and this is the BACKWARD pass.
//
// Rows of an image lie in shared memory one after the other, place after place (128 bytes each), one zero place behind
// every row. So the neighbour to the right is 128 bytes further, the one below 33 * 128, and the zeros are also the
// left border of the next row. The nine taps of a kernel are nine products of the same matrix, begun at nine addresses:
// each number comes from global memory once, where a general convolution fetches it nine times.
//
// Within a place its eight planes (eight channels, 16 bytes) lie in an order that changes with the address, as tensor
// cores expect it: plane p of the place at address a is at a + 16 * (p ^ a / 128 % 8). It repeats every 1,024 bytes. As
// it depends on nothing but the address, a product may begin at any place.
//
// A block of threads stays and takes one tile after the other. One group of four warps brings tiles, three multiply.

constexpr int SIDE = 32, PITCH = SIDE + 1;   // places of a row; with the zero
constexpr int CHANNELS = 64, PLANES = CHANNELS / 8;
constexpr int PLACE = CHANNELS * 2;          // bytes
constexpr int PATTERN = 1024;                // bytes after which the order of planes repeats
constexpr int BLOCK = 128;                   // bytes of 8x8 weights, which lie one after the other
constexpr int BRINGERS = 128;                // threads
constexpr int ITS_WARPS = 4, GROUPS = 3;     // warps of a group that multiplies; such groups

// ---- what C++ has no words for

__device__ u32 address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }
__device__ void make_barrier(u32 at, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ void arrive(u32 at) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0]; }" ::"r"(at) : "memory");
}
__device__ void wait(u32 at, u32 parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra OVER; bra AGAIN; OVER: }" ::"r"(at), "r"(parity) : "memory");
}
__device__ void copy(u32 to, const void* from, bool there) {  // 16 bytes, or zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int NEWER>
__device__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(NEWER) : "memory"); }
__device__ void zero(u32 at) {  // 16 bytes
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}
__device__ void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int REGISTERS>
__device__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
__device__ void leave_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// Matrices in shared memory. Adding bytes / 16 moves where they begin.
__device__ u64 matrix_of_blocks(u32 at, u32 along_k, u32 along_other) {  // bytes from block to block
  return (u64)(at >> 4) | (u64)(along_k >> 4) << 16 | (u64)(along_other >> 4) << 32;
}
__device__ u64 matrix_of_places(u32 at) {
  return (u64)(at >> 4) | (u64)1 << 16 | (u64)(PATTERN >> 4) << 32 | (u64)1 << 62;
}
__device__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void end_of_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int NEWER>
__device__ void await_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWER) : "memory"); }
template <int COUNT>
__device__ void settle(float (&sums)[COUNT]) {  // the compiler may not read them before, nor write them after
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}
__device__ void load_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ u32 transpose(u32 mine) {  // of 8x8 numbers that a warp holds
  u32 other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(mine));
  return other;
}

__device__ float over_four(float value) {  // neighbouring threads
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// ---- pairs of bfloat16

__device__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ u32 pair(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ u32 relu_pair(float low, float high) {  // NaN stays NaN
  u32 both;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// BatchNorm and ReLU of the input, in shared memory: scale and shift of eight channels, of (parts, 2, CHANNELS) in all.
struct Line {
  float2 scale[4], shift[4];
  __device__ Line(const float2* lines, int part, int plane) {
    const float2* mine = lines + part * CHANNELS + plane * 4;
    for (int i = 0; i < 4; i++) scale[i] = mine[i], shift[i] = mine[i + CHANNELS / 2];
  }
  __device__ void apply(u32 at) const {
    u32 r[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
#pragma unroll
    for (int i = 0; i < 4; i++)
      r[i] = relu_pair(low(r[i]) * scale[i].x + shift[i].x, high(r[i]) * scale[i].y + shift[i].y);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  }
};

// A thread that brings tiles brings one plane of every 16th place, here of rows [FROM, TO) of a tile.
struct Rows {
  int top, first, plane;  // the row of the image that is row 0 of the tile; the thread's first place in it
  __device__ u32 at(int i) const {
    int row = i / 2 + first, its = plane;  // PITCH is 1 more than a multiple of 8
    asm volatile("" : "+r"(its));          // or the compiler keeps all addresses in registers
    return (first + i / 2 * PITCH + i % 2 * 16) * PLACE + (((its ^ row) & 7) << 4);
  }
  template <int FROM, int TO>
  __device__ void bring(u32 to, const uint4* from) const {
#pragma unroll
    for (int i = 2 * FROM; i < 2 * TO; i++) {
      const bool there = (unsigned)(top + i / 2) < SIDE;
      copy(to + at(i), from + (there ? (i / 2 * SIDE + i % 2 * 16) * PLANES : SIDE * PLANES), there);
    }
  }
  template <int FROM, int TO>
  __device__ void normalise(u32 to, const Line& line) const {
#pragma unroll 4
    for (int i = 2 * FROM; i < 2 * TO; i++)
      if ((unsigned)(top + i / 2) < SIDE) line.apply(to + at(i));
  }
};

// ---- y = convolution of x, or of relu(norm(x)); backward: the gradient of x

namespace forward {
constexpr int HIGH = 16;                                // rows of a tile, which is half an image
constexpr int MINE = HIGH * PITCH / GROUPS;             // its places that a group works out, zero places included
constexpr int RESULTS = MINE / 2;                       // of a thread: 64 channels of those places for 128 threads
constexpr int INPUT = (HIGH + 2) * PITCH + 2;           // its places and those around them
constexpr int STAGE = (INPUT * PLACE + PATTERN - 1) / PATTERN * PATTERN;
constexpr int TAP = CHANNELS * CHANNELS * 2, WEIGHTS = 9 * TAP;
constexpr int PARTS = 3;                                // in which a tile is brought
static_assert(HIGH * PITCH % (GROUPS * 8) == 0, "tile");
static_assert(WEIGHTS + 2 * STAGE + (2 * 2 * PARTS + GROUPS) * 8 == CONVOLVE_SHARED, "small_conv.py knows");

__device__ int row_of(int place) { return place / PITCH; }
__device__ bool inside(int place) { return place % PITCH < SIDE; }

// The parts: rows that only the first group reads, rows that the first two read, and rows that the last two read.
__device__ constexpr int first_row(int part) { return part == 0 ? 0 : part == 1 ? 5 : part == 2 ? 10 : HIGH + 2; }
static_assert(first_row(1) * PITCH + 1 <= MINE && first_row(2) * PITCH + 1 <= 2 * MINE, "the second, the third group");
static_assert(MINE + 2 * PITCH + 2 <= first_row(2) * PITCH + 1, "the first group");

struct Bringer {
  u32 stages, full, empty;
  const uint4* x;
  const float2* lines;
  int images, plane, left;

  template <int PART>
  __device__ void bring(int turn, int tile) const {
    const int top = tile % 2 * HIGH - 1;
    wait(empty + (turn % 2 * PARTS + PART) * 8, (turn / 2 + 1) % 2);
    const uint4* from = x + ((long long)(tile / 2) * SIDE + top) * SIDE * PLANES;
    Rows{top, 1 + left, plane}.bring<first_row(PART), first_row(PART + 1)>(stages + turn % 2 * STAGE, from);
    end_of_copies();
  }
  template <int PART>
  __device__ void finish(int turn, int tile) const {
    const Rows rows{tile % 2 * HIGH - 1, 1 + left, plane};
    const u32 at = stages + turn % 2 * STAGE;
    if (NORMED) rows.normalise<first_row(PART), first_row(PART + 1)>(at, Line(lines, tile / 2 / images, plane));
    show_to_tensor_cores();
    arrive(full + (turn % 2 * PARTS + PART) * 8);
  }
};
}  // namespace forward

extern "C" __global__ __launch_bounds__(512, 1) void convolve(
    const uint4* __restrict__ x, const uint4* __restrict__ weight, unsigned char* __restrict__ y,
    float* __restrict__ spreads, const float2* __restrict__ lines, int tiles, int images) {
  using namespace forward;
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 weights = address(memory), stages = weights + WEIGHTS, full = stages + 2 * STAGE;
  const u32 empty = full + 2 * PARTS * 8, turns = empty + 2 * PARTS * 8;
  const int thread = threadIdx.x, group = __shfl_sync(~0u, thread / 128, 0), lane = thread % 32;

  for (int i = thread; i < WEIGHTS / 16; i += 512)  // (tap, plane, channel out)
    copy(weights + i * 16, weight + i % CHANNELS * 9 * PLANES + i / CHANNELS, true);
  for (int i = thread; i < 2 * PLANES * (HIGH + 4); i += 512) {  // places left and right of rows: always zero
    const int row = i / PLANES % (HIGH + 4), place = row < HIGH + 3 ? row * PITCH : INPUT - 1;
    zero(stages + i / PLANES / (HIGH + 4) * STAGE + place * PLACE + i % PLANES * 16);
  }
  end_of_copies();
  await_copies<0>();
  if (thread == 0) {
    for (int i = 0; i < 2 * PARTS; i++) {  // a part is used by one group or by two
      make_barrier(full + 8 * i, BRINGERS);
      make_barrier(empty + 8 * i, i % PARTS == 0 ? ITS_WARPS : 2 * ITS_WARPS);
    }
    for (int i = 0; i < GROUPS; i++) make_barrier(turns + 8 * i, ITS_WARPS);
  }
  show_to_tensor_cores();
  __syncthreads();

  if (group == GROUPS) {
    leave_registers<56>();
    const int plane = thread % PLANES, left = thread % BRINGERS / PLANES;
    const Bringer bringer{stages, full, empty, x + left * PLANES + plane, lines, images, plane, left};
    int turn = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn++) {
      bringer.bring<0>(turn, tile);
      if (turn > 0) await_copies<1>(), bringer.finish<2>(turn - 1, tile - gridDim.x);
      bringer.bring<1>(turn, tile);
      await_copies<1>(), bringer.finish<0>(turn, tile);
      bringer.bring<2>(turn, tile);
      await_copies<1>(), bringer.finish<1>(turn, tile);
    }
    if (turn > 0) await_copies<0>(), bringer.finish<2>(turn - 1, blockIdx.x + (turn - 1) * gridDim.x);
    return;
  }

  take_registers<152>();
  // A thread holds pairs of places next to each other, and writes others: which of them are inside the image, as bits.
  const int warp = thread / 32 % ITS_WARPS, across = lane % 4, down = lane / 4;
  u32 lower = 0, upper = 0, written = 0;
  for (int i = 0; i < RESULTS / 4; i++) {
    const int place = group * MINE + i * 8;
    lower |= inside(place + across * 2) << i;
    upper |= inside(place + across * 2 + 1) << i;
    written |= inside(place + down) << i;
  }
  const int outside = (group + 1) * MINE / PITCH - group * MINE / PITCH;
  for (int turn = 0, tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn++) {
    float sums[RESULTS];
    // Weights lie as (tap, plane, channel out, channel in of the plane); backward reads the same as its transpose.
    const u32 to_plane = CHANNELS * 16;
    const u64 a = BACKWARD ? matrix_of_blocks(weights, BLOCK, to_plane) : matrix_of_blocks(weights, to_plane, BLOCK);
    const u64 b = matrix_of_places(stages + turn % 2 * STAGE + group * MINE * PLACE);
    const u32 its = turn % 2 * PARTS * 8;
    if (group < 1) wait(full + its, turn / 2 % 2);
    if (group < 2) wait(full + its + 8, turn / 2 % 2);
    if (group > 0) wait(full + its + 16, turn / 2 % 2);
    wait(turns + group * 8, (turn + (group == 0)) % 2);  // one group multiplies while the others write
    begin_products();
#pragma unroll
    for (int tap = 0; tap < 9; tap++)
#pragma unroll
      for (int k = 0; k < CHANNELS / 16; k++) {
        const int from = BACKWARD ? (8 - tap) * TAP + k * 2 * BLOCK : tap * TAP + k * 2 * to_plane;
        const int at = k * 32 + (tap / 3 * PITCH + tap % 3) * PLACE;
        multiply(sums, a + from / 16, b + at / 16, tap + k > 0);
      }
    end_of_products();
    if (lane == 0) arrive(turns + (group + 1) % GROUPS * 8);
    await_products<0>();
    settle(sums);
    if (lane == 0) {
      if (group < 1) arrive(empty + its);
      if (group < 2) arrive(empty + its + 8);
      if (group > 0) arrive(empty + its + 16);
    }

    u32 pairs[RESULTS / 2];  // of channel `down` (even ones) and of eight channels further (odd ones)
#pragma unroll
    for (int i = 0; i < RESULTS / 2; i++) pairs[i] = pair(sums[2 * i], sums[2 * i + 1]);
    if (!BACKWARD) {  // moments of this group's places: the mean, and the squares around it
      const float count = MINE - outside;
      float mean[2] = {0, 0}, squares[2] = {0, 0};
      asm volatile("" : "+r"(lower), "+r"(upper));  // or the compiler keeps all their bits in registers
#pragma unroll
      for (int i = 0; i < RESULTS / 2; i++) {
        if (!(lower >> i / 2 & 1)) pairs[i] &= 0xffff0000u;
        if (!(upper >> i / 2 & 1)) pairs[i] &= 0x0000ffffu;
        mean[i % 2] += low(pairs[i]) + high(pairs[i]);
      }
      for (int h = 0; h < 2; h++) mean[h] = over_four(mean[h]) / count;
#pragma unroll
      for (int i = 0; i < RESULTS / 2; i++) {
        const float l = low(pairs[i]) - mean[i % 2], h = high(pairs[i]) - mean[i % 2];
        squares[i % 2] += l * l + h * h;
      }
      for (int h = 0; h < 2; h++) squares[h] = over_four(squares[h]) - outside * mean[h] * mean[h];  // zeros outside
      float* means = spreads + ((long long)tile * GROUPS + group) * CHANNELS + warp * 16 + down;
      float* its_squares = means + (long long)tiles * GROUPS * CHANNELS;
      if (across == 0)
        for (int h = 0; h < 2; h++) means[8 * h] = mean[h], its_squares[8 * h] = squares[h];
    }
    // Transposed, a thread has two channels of one place twice; with its neighbour's it writes four in a row.
    int mine = group * MINE + down;
    asm volatile("" : "+r"(written), "+r"(mine));
    const int channel = warp * 16 + (across % 2 ? 8 + 2 * (across - 1) : 2 * across);
    unsigned char* to = y + ((long long)tile * HIGH * SIDE * CHANNELS + channel) * 2;
#pragma unroll
    for (int i = 0; i < RESULTS / 4; i++) {
      const u32 one = transpose(pairs[2 * i]), two = transpose(pairs[2 * i + 1]);
      const u32 other = __shfl_xor_sync(~0u, across % 2 ? one : two, 1);
      const int place = mine + i * 8;
      const uint2 four = across % 2 ? make_uint2(other, two) : make_uint2(one, other);
      if (written >> i & 1) *(uint2*)(to + (place - row_of(place)) * PLACE) = four;
    }
  }
}

// ---- the gradient of the weight: of every tap, the sum over all places of gradient x input

namespace backward {
constexpr int HIGH = 4, STEPS = 9;                          // rows of a tile; products of 16 places
constexpr int INPUT = STEPS * 16 + 2 * PITCH + 2;           // places that are read of x,
constexpr int ITS = (INPUT * PLACE + PATTERN - 1) / PATTERN * PATTERN;  // where those of the gradient begin;
constexpr int STAGE = ITS + STEPS * 16 * PLACE;                         // behind the rows of a tile both are zero
constexpr int STAGES = 5, AHEAD = 3;                        // copies under way
constexpr int IN_REGISTERS = 3;                             // products whose left side is in registers
constexpr int RESULTS = 32;                                 // of a thread and a tap
static_assert(STEPS * 16 >= HIGH * PITCH && STEPS % IN_REGISTERS == 0, "tile");
static_assert(STAGES * (STAGE + 2 * 8) == WEIGHT_GRADIENT_SHARED, "small_conv.py knows");
}  // namespace backward

extern "C" __global__ __launch_bounds__(512, 1) void weight_gradient(
    const uint4* __restrict__ x, const uint4* __restrict__ gradient, float* __restrict__ partial,
    const float2* __restrict__ lines, int tiles, int images) {
  using namespace backward;
  constexpr int A_IMAGE = SIDE / HIGH;  // tiles
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 stages = address(memory), full = stages + STAGES * STAGE, empty = full + STAGES * 8;
  const int thread = threadIdx.x, group = __shfl_sync(~0u, thread / 128, 0), lane = thread % 32;

  for (int i = thread; i < STAGES * STAGE / 16; i += 512) zero(stages + i * 16);
  if (thread == 0)
    for (int i = 0; i < STAGES; i++)
      make_barrier(full + 8 * i, BRINGERS), make_barrier(empty + 8 * i, GROUPS * ITS_WARPS);
  show_to_tensor_cores();
  __syncthreads();

  if (group == GROUPS) {
    leave_registers<56>();
    const int plane = thread % PLANES, left = thread % BRINGERS / PLANES;
    auto finish = [&](int turn) {
      const int tile = blockIdx.x + turn * gridDim.x, stage = turn % STAGES;
      const Rows rows{tile % A_IMAGE * HIGH - 1, 1 + left, plane};
      if (NORMED) rows.normalise<0, HIGH + 2>(stages + stage * STAGE, Line(lines, tile / A_IMAGE / images, plane));
      show_to_tensor_cores();
      arrive(full + stage * 8);
    };
    int turn = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn++) {
      const int top = tile % A_IMAGE * HIGH - 1, stage = turn % STAGES;
      const long long start = ((long long)(tile / A_IMAGE) * SIDE * SIDE + top * SIDE + left) * PLANES + plane;
      wait(empty + stage * 8, (turn / STAGES + 1) % 2);
      Rows{top, 1 + left, plane}.bring<0, HIGH + 2>(stages + stage * STAGE, x + start);
      Rows{top + 1, left, plane}.bring<0, HIGH>(stages + stage * STAGE + ITS, gradient + start + SIDE * PLANES);
      end_of_copies();
      if (turn >= AHEAD) await_copies<AHEAD>(), finish(turn - AHEAD);
    }
    await_copies<0>();
    for (int last = max(turn - AHEAD, 0); last < turn; last++) finish(last);
    return;
  }

  take_registers<152>();
  float sums[3][RESULTS];  // of the three taps of a row of the kernel; each group has one row
#pragma unroll
  for (int i = 0; i < RESULTS; i++) sums[0][i] = sums[1][i] = sums[2][i] = 0;
  for (int tap = 0; tap < 3; tap++) settle(sums[tap]);
  const int plane = thread / 32 % ITS_WARPS * 2 + lane / 8 % 2;
  const u32 its = stages + ITS + (lane / 16 * 8 + lane % 8) * PLACE + ((plane ^ lane % 8) << 4);
  for (int turn = 0, tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn++) {
    const u32 stage = turn % STAGES;
    const u64 b = matrix_of_places(stages + stage * STAGE + group * PITCH * PLACE);
    u32 a[2][IN_REGISTERS][4];
    wait(full + stage * 8, turn / STAGES % 2);
#pragma unroll
    for (int first = 0; first < STEPS; first += IN_REGISTERS) {
      const int buffer = first / IN_REGISTERS % 2;
#pragma unroll
      for (int k = 0; k < IN_REGISTERS; k++)
        load_transposed(a[buffer][k], its + stage * STAGE + (first + k) * 16 * PLACE);
      begin_products();
#pragma unroll
      for (int k = 0; k < IN_REGISTERS; k++)
#pragma unroll
        for (int tap = 0; tap < 3; tap++)
          multiply(sums[tap], a[buffer][k], b + ((first + k) * 16 + tap) * PLACE / 16, true);
      end_of_products();
      await_products<1>();
    }
    await_products<0>();
    for (int tap = 0; tap < 3; tap++) settle(sums[tap]);
    if (lane == 0) arrive(empty + stage * 8);
  }
  float* mine = partial + (long long)blockIdx.x * 9 * CHANNELS * CHANNELS;
  const int row = thread / 32 % ITS_WARPS * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int tap = 0; tap < 3; tap++)
#pragma unroll
    for (int i = 0; i < RESULTS / 2; i++) {
      const int out = row + i % 2 * 8, in = i / 2 * 8 + column;
      float2* to = (float2*)(mine + (out * 9 + group * 3 + tap) * CHANNELS + in);
      *to = make_float2(sums[tap][2 * i], sums[tap][2 * i + 1]);
    }
}
