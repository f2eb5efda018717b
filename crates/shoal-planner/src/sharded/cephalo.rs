//! Cephalo by its own rules, for comparison: one transformer layer's measured times, sixteen bytes of state a
//! parameter, memory judged over all GPUs together, and a dynamic program over samples and the sum of micro-batch
//! sizes. Its defects are kept where they decide its answers, and named. Beside it stands what our search makes of the
//! same tables, with every GPU's memory judged by itself.

use serde::{Deserialize, Serialize};
use shoal_plan::Activations;

use super::balance::{Load, Way, Worker, balance, fastest, micro_batch_sizes};
use super::shares::level;

const GIB: f64 = (1u64 << 30) as f64;
/// Whose state a GiB holds.
const PARAMETERS_A_GIB: f64 = GIB / 16.0;

/// Milliseconds of one layer by the size of the micro-batch: a table from one sample on, and a line beyond it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerMilliseconds {
    pub table: Vec<f64>,
    pub slope: f64,
    pub intercept: f64,
}

impl LayerMilliseconds {
    pub fn at(&self, samples: usize) -> f64 {
        match samples.checked_sub(1) {
            None => 0.0,
            Some(place) => {
                self.table.get(place).copied().unwrap_or(self.slope * samples as f64 + self.intercept)
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    pub kind: String,
    pub capacity_gib: f64,
    pub forward: LayerMilliseconds,
    pub backward: LayerMilliseconds,
}

/// What a model takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelMemory {
    pub parameters: u64,
    /// By the size of the micro-batch, from one sample on: at least one entry.
    pub compute_gib: Vec<f64>,
}

impl ModelMemory {
    pub fn state_gib(&self) -> f64 {
        self.parameters as f64 / PARAMETERS_A_GIB
    }

    /// Beyond the table it grows as it did over the last five entries.
    pub fn compute_gib(&self, micro_batch: usize) -> f64 {
        let (table, count) = (&self.compute_gib, self.compute_gib.len());
        if let Some(known) = table.get(micro_batch.max(1) - 1) {
            return *known;
        }
        let span = count.min(5) - 1;
        let growth = if span == 0 { 0.0 } else { (table[count - 1] - table[count - 1 - span]) / span as f64 };
        table[count - 1] + growth * (micro_batch - count) as f64
    }
}

/// The constants of its model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rules {
    pub gather_ms: f64,
    pub reduce_ms: f64,
    /// Between two micro-batches' backwards.
    pub between_ms: f64,
    pub communication_gib: f64,
    /// The share of a GPU's memory that may be used.
    pub usable: f64,
    /// How much longer collectives take for a GPU whose micro-batch leaves no room for an even part of the state.
    pub uneven: f64,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            gather_ms: 0.0,
            reduce_ms: 0.0,
            between_ms: 10.0,
            communication_gib: 2.0,
            usable: 0.75,
            uneven: 1.25,
        }
    }
}

impl Rules {
    /// What a GPU has left for state beside micro-batches of a size.
    pub fn room_gib(&self, gpu: &Gpu, memory: &ModelMemory, micro_batch: usize) -> f64 {
        self.usable * gpu.capacity_gib - self.communication_gib - memory.compute_gib(micro_batch)
    }

    /// Milliseconds of a layer on a GPU for micro-batches of a size, the last of which may be smaller.
    pub fn layer_ms(&self, gpu: &Gpu, micro_batch: usize, samples: usize, uneven: bool) -> f64 {
        let (whole, rest) = (samples / micro_batch, samples % micro_batch);
        let sum = |times: &LayerMilliseconds| whole as f64 * times.at(micro_batch) + times.at(rest);
        let forward = sum(&gpu.forward);
        let backward = (samples.div_ceil(micro_batch) - 1) as f64 * self.between_ms + sum(&gpu.backward);
        let stretch = if uneven { self.uneven } else { 1.0 };
        let (gather, reduce) = (stretch * self.gather_ms, stretch * self.reduce_ms);
        gather.max(forward) + (gather + reduce).max(forward + backward)
    }
}

/// A division of work and state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Division {
    /// By GPU.
    pub batches: Vec<usize>,
    pub micro_batches: Vec<usize>,
    /// By GPU, parameters whose state it keeps.
    pub parameters: Vec<f64>,
    pub layer_ms: f64,
    /// By GPU, what its own samples and state take beyond its usable memory; less than none where there is room.
    pub over_gib: Vec<f64>,
    /// By all GPUs together, the way Cephalo judges.
    pub fits_together: bool,
}

impl Division {
    /// Whether every GPU has room for what it is given.
    pub fn fits_each(&self) -> bool {
        self.over_gib.iter().all(|over| *over <= 0.0)
    }
}

/// A job for the two planners.
#[derive(Clone, Debug)]
pub struct Case<'a> {
    pub gpus: &'a [Gpu],
    pub memory: &'a ModelMemory,
    pub batch: usize,
    pub rules: Rules,
}

/// Times of the best division of so many samples with micro-batch sizes of such a sum, over the first GPUs: one plane
/// a GPU.
struct Planes {
    batch: usize,
    /// By GPU, the micro-batches it may have: size, count, milliseconds; in the order in which ties are broken.
    options: Vec<Vec<(usize, usize, f64)>>,
    planes: Vec<Vec<f64>>,
}

impl Case<'_> {
    /// Cephalo's answer. None where it has none: it gives every GPU at least one sample.
    pub fn theirs(&self) -> Option<Division> {
        let planes = self.planes();
        let mut best: Option<Division> = None;
        for sum in 1..=self.batch {
            let Some((sizes, batches)) = planes.trace(sum) else { continue };
            let state = self.their_state(&sizes, &batches);
            let division = self.divide(&sizes, batches, state);
            // What comes first is taken even if it does not fit.
            let taken =
                best.as_ref().is_none_or(|best| division.layer_ms < best.layer_ms && division.fits_together);
            if taken {
                best = Some(division);
            }
        }
        best
    }

    /// The best that its program finds and that fits every GPU once state goes where there is room for it.
    pub fn theirs_made_feasible(&self) -> Option<Division> {
        let planes = self.planes();
        let mut best: Option<Division> = None;
        for sum in 1..=self.batch {
            let Some((sizes, batches)) = planes.trace(sum) else { continue };
            let state = self.state_by_room(&sizes);
            let division = self.divide(&sizes, batches, state);
            if division.fits_each() && best.as_ref().is_none_or(|best| division.layer_ms < best.layer_ms) {
                best = Some(division);
            }
        }
        best
    }

    /// Ours: every GPU judged by itself, GPUs without samples allowed, the last micro-batch of any size.
    pub fn ours(&self) -> Option<Division> {
        let ways: Vec<Way> = micro_batch_sizes(self.batch)
            .into_iter()
            .map(|micro_batch| Way { micro_batch, activations: Activations::Offload })
            .collect();
        let mut kinds: Vec<&Gpu> = Vec::new();
        let kind_of: Vec<usize> = self
            .gpus
            .iter()
            .map(|gpu| {
                kinds.iter().position(|known| *known == gpu).unwrap_or_else(|| {
                    kinds.push(gpu);
                    kinds.len() - 1
                })
            })
            .collect();
        let even = self.memory.state_gib() / self.gpus.len() as f64;
        let rises = |times: &LayerMilliseconds| {
            (1..=self.batch).all(|samples| times.at(samples - 1) <= times.at(samples))
        };
        let mut workers: Vec<GpuWorker> = Vec::new();
        for gpu in kinds {
            let rises = rises(&gpu.forward) && rises(&gpu.backward);
            workers.push(GpuWorker { case: self, gpu, ways: &ways, even, rises });
        }
        let found = balance(&workers, &kind_of, self.batch, self.memory.state_gib(), f64::INFINITY)?;
        let size = |load: &Load| load.way.map_or(0, |way| way.micro_batch);
        let mut loads = found.loads;
        let state = self.state_by_room(&loads.iter().map(size).collect::<Vec<usize>>());
        // Whoever got less state than it has room for may use the rest to be faster.
        for ((load, kind), state) in
            loads.iter_mut().zip(&kind_of).zip(&state).filter(|((load, _), _)| load.samples > 0)
        {
            *load = fastest(&workers[*kind], load.samples, state / PARAMETERS_A_GIB).unwrap_or(*load);
        }
        let sizes: Vec<usize> = loads.iter().map(size).collect();
        Some(self.divide(&sizes, loads.iter().map(|load| load.samples).collect(), state))
    }

    fn planes(&self) -> Planes {
        let (batch, count) = (self.batch, self.gpus.len());
        let side = batch + 1;
        let options: Vec<Vec<(usize, usize, f64)>> = self.gpus.iter().map(|gpu| self.options(gpu)).collect();
        let mut planes = vec![vec![f64::INFINITY; side * side]];
        planes[0][0] = 0.0;
        for (done, options) in options.iter().enumerate() {
            let before = &planes[done];
            let mut next = vec![f64::INFINITY; side * side];
            for (size, number, ms) in options {
                let taken = size * number;
                // Others have a sample each at the least, and the micro-batches before are no more than their samples.
                for samples in taken + done..=batch - (count - 1 - done) {
                    let from = &before[(samples - taken) * side..][..=samples - taken];
                    let to = &mut next[samples * side + size..][..=samples - taken];
                    for (to, from) in to.iter_mut().zip(from) {
                        let time = from.max(*ms);
                        *to = if time < *to { time } else { *to };
                    }
                }
            }
            planes.push(next);
        }
        Planes { batch, options, planes }
    }

    fn options(&self, gpu: &Gpu) -> Vec<(usize, usize, f64)> {
        let even = self.memory.state_gib() / self.gpus.len() as f64;
        let most = self.batch.saturating_sub(self.gpus.len() - 1);
        let fitting = (1..=most).take_while(|size| self.rules.room_gib(gpu, self.memory, *size) >= 0.0);
        fitting
            .flat_map(|size| {
                let uneven = self.rules.room_gib(gpu, self.memory, size) < even;
                (1..=most / size)
                    .map(move |number| (size, number, self.rules.layer_ms(gpu, size, size * number, uneven)))
            })
            .collect()
    }

    /// Its division of the state: evenly, then those short of room shed what they lack, which is poured level onto those
    /// who have some. It takes the number of micro-batches for their size, so what it believes of room is mostly that of
    /// one sample.
    fn their_state(&self, sizes: &[usize], batches: &[usize]) -> Vec<f64> {
        let even = self.memory.parameters as f64 / self.gpus.len() as f64;
        let slack = |place: usize| {
            let number = batches[place] / sizes[place];
            let believed = batches[place].div_ceil(batches[place] / number);
            let room = self.rules.room_gib(&self.gpus[place], self.memory, believed);
            (room * PARAMETERS_A_GIB - even).floor()
        };
        let slacks: Vec<f64> = (0..self.gpus.len()).map(slack).collect();
        let shed: f64 = slacks.iter().map(|slack| (-slack).max(0.0)).sum();
        let poured = level(&slacks.iter().map(|slack| slack.max(0.0)).collect::<Vec<_>>(), shed);
        slacks.iter().zip(poured).map(|(slack, poured)| even + slack.min(0.0) + poured).collect()
    }

    /// As level as every GPU's own room allows; what finds no room is divided evenly on top.
    fn state_by_room(&self, sizes: &[usize]) -> Vec<f64> {
        let room =
            |(gpu, size): (&Gpu, &usize)| (self.room_of(gpu, *size) * PARAMETERS_A_GIB).floor().max(0.0);
        let rooms: Vec<f64> = self.gpus.iter().zip(sizes).map(room).collect();
        let total = self.memory.parameters as f64;
        let mut parameters: Vec<f64> = level(&rooms, total).iter().map(|share| share.floor()).collect();
        let mut left = total - parameters.iter().sum::<f64>();
        for (share, room) in parameters.iter_mut().zip(rooms) {
            let more = left.min(room - *share);
            (*share, left) = (*share + more, left - more);
        }
        let each = left / parameters.len() as f64;
        parameters.into_iter().map(|share| share + each).collect()
    }

    fn room_of(&self, gpu: &Gpu, micro_batch: usize) -> f64 {
        match micro_batch {
            0 => self.rules.usable * gpu.capacity_gib - self.rules.communication_gib,
            _ => self.rules.room_gib(gpu, self.memory, micro_batch),
        }
    }

    fn divide(&self, sizes: &[usize], batches: Vec<usize>, parameters: Vec<f64>) -> Division {
        let even = self.memory.state_gib() / self.gpus.len() as f64;
        let rooms: Vec<f64> =
            self.gpus.iter().zip(sizes).map(|(gpu, size)| self.room_of(gpu, *size)).collect();
        let computing = (0..batches.len()).filter(|place| batches[*place] > 0);
        let layer_ms = computing
            .map(|at| self.rules.layer_ms(&self.gpus[at], sizes[at], batches[at], rooms[at] < even))
            .fold(0.0, f64::max);
        let over_gib: Vec<f64> =
            parameters.iter().zip(&rooms).map(|(share, room)| share / PARAMETERS_A_GIB - room).collect();
        let micro_batches = batches.iter().zip(sizes).map(|(batch, size)| batch.div_ceil((*size).max(1)));
        Division {
            micro_batches: micro_batches.collect(),
            batches,
            parameters,
            layer_ms,
            over_gib,
            fits_together: self.memory.state_gib() < rooms.iter().sum(),
        }
    }
}

impl Planes {
    /// The division behind a sum of micro-batch sizes: sizes and batches by GPU. Of equal times the first option counts.
    fn trace(&self, sum: usize) -> Option<(Vec<usize>, Vec<usize>)> {
        let side = self.batch + 1;
        let (mut samples, mut sum) = (self.batch, sum);
        let mut found: Vec<(usize, usize)> = Vec::new();
        for (done, options) in self.options.iter().enumerate().rev() {
            let time = self.planes[done + 1][samples * side + sum];
            let leads = |(size, number, ms): &&(usize, usize, f64)| {
                let taken = size * number;
                taken <= samples
                    && *size <= sum
                    && self.planes[done][(samples - taken) * side + sum - size].max(*ms) == time
            };
            let (size, number, _) = options.iter().find(leads).filter(|_| time.is_finite())?;
            found.push((*size, size * number));
            (samples, sum) = (samples - size * number, sum - size);
        }
        Some(found.into_iter().rev().unzip())
    }
}

/// A kind of GPU by their tables, for our search.
struct GpuWorker<'a> {
    case: &'a Case<'a>,
    gpu: &'a Gpu,
    ways: &'a [Way],
    /// GiB of an even part of the state.
    even: f64,
    rises: bool,
}

impl Worker for GpuWorker<'_> {
    fn ways(&self) -> &[Way] {
        self.ways
    }

    fn seconds(&self, way: Way, samples: usize) -> f64 {
        let uneven = self.room(way, samples) < self.even;
        self.case.rules.layer_ms(self.gpu, way.micro_batch, samples, uneven)
    }

    fn room(&self, way: Way, samples: usize) -> f64 {
        self.case.room_of(self.gpu, way.micro_batch.min(samples))
    }

    fn idle_room(&self) -> f64 {
        self.case.room_of(self.gpu, 0)
    }

    fn rises(&self) -> bool {
        self.rises
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn line(slope: f64, intercept: f64) -> LayerMilliseconds {
        LayerMilliseconds { table: Vec::new(), slope, intercept }
    }

    /// The GPUs of its shipped plan for GPT-2.7B in fp16 at 512 tokens, and that model's memory.
    pub(crate) fn golden() -> (Vec<Gpu>, ModelMemory) {
        let gpu = |kind: &str, capacity_gib: f64, forward: (f64, f64), backward: (f64, f64)| Gpu {
            kind: kind.into(),
            capacity_gib,
            forward: line(forward.0, forward.1),
            backward: line(backward.0, backward.1),
        };
        let l4 = gpu("l4", 22.5, (7.415036, 1.181504), (10.94616, 4.842824));
        let a6000 = gpu("a6000", 47.99, (2.835478, 0.664214), (4.22101, 2.404014));
        let p40 = gpu("p40", 22.5, (15.637328, 4.132932), (28.016862, 1.877118));
        let compute_gib = vec![1.120, 1.490, 1.863, 2.233];
        (vec![l4.clone(), l4, a6000, p40], ModelMemory { parameters: 2_770_621_440, compute_gib })
    }

    #[test]
    fn its_golden_case_comes_out() {
        let (gpus, memory) = golden();
        let case = Case { gpus: &gpus, memory: &memory, batch: 64, rules: Rules::default() };
        let theirs = case.theirs().expect("it has an answer");
        assert_eq!(theirs.batches, [13, 12, 34, 5]);
        assert_eq!(theirs.micro_batches, [1, 2, 1, 1]);
        assert!((theirs.layer_ms - 342.297).abs() < 5e-4, "{}", theirs.layer_ms);
        // It divides the state evenly, which the first GPU has no room for.
        assert!(theirs.parameters.iter().all(|share| *share == 2_770_621_440.0 / 4.0), "{theirs:?}");
        assert!(theirs.fits_together && !theirs.fits_each());
        assert!((theirs.over_gib[0] - 1.02).abs() < 0.01, "{:?}", theirs.over_gib);

        let feasible = case.theirs_made_feasible().expect("state may go elsewhere");
        let ours = case.ours().expect("ours has an answer where theirs has one");
        assert!(feasible.fits_each() && ours.fits_each(), "{feasible:?} {ours:?}");
        assert_eq!(ours.batches.iter().sum::<usize>(), 64);
        assert!((ours.parameters.iter().sum::<f64>() - memory.parameters as f64).abs() < 1.0);
        assert!(ours.layer_ms <= feasible.layer_ms, "{} against {}", ours.layer_ms, feasible.layer_ms);
    }
}
