//! One program on its way through a step: what of it has started and finished, what may start next, and the memory of its values.

use std::collections::HashMap;

use shoal_plan::effects::effects;
use shoal_plan::memory::Meter;
use shoal_plan::{Lane, Layout, Op, Program};

use super::{DeviceTime, Span, closing_place, line};
use crate::world::World;

/// A program under way.
pub(super) struct Course<'a> {
    pub(super) program: &'a Program,
    /// Which of its step's programs it is, and how many steps were before.
    pub(super) number: usize,
    pub(super) step: usize,
    /// By place, and one more behind the last.
    pub(super) slots: Vec<Slot>,
    /// Who comes after each, one instruction's after the other's.
    pub(super) followers: Vec<u32>,
    /// The first that has not started.
    pub(super) next: usize,
    /// Those that may start ahead, by the place from which on they may, the last first.
    pub(super) early: Vec<(usize, usize)>,
    /// Those of them that may by now.
    pub(super) may: Vec<usize>,
    pub(super) spans: Vec<Span>,
    pub(super) left: usize,
    pub(super) computations_left: usize,
    /// Instructions left but for those that the next step may begin without, and when the last of them ended.
    pub(super) listed_left: usize,
    pub(super) listed_end: f64,
    /// Of those, what comes after them in the next step's program: that program, and its places.
    pub(super) followed_by: HashMap<usize, Vec<(usize, usize)>>,
    pub(super) meter: Option<Memory<'a>>,
    pub(super) world: &'a dyn World,
    /// Where it runs: not always the device that the program names.
    pub(super) device: usize,
}

/// What is asked of an instruction again and again. It lies together: the programs of a large fleet are in no cache, and what
/// takes time is to look at them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// How many of those that it comes after have not finished.
    pub(super) awaits: u32,
    /// Where those that come after it begin among the program's followers.
    pub(super) first_follower: u32,
    /// What it keeps busy, if that does one instruction after the other.
    pub(super) lane: Option<u8>,
    /// The line it waits in.
    pub(super) line: Option<u8>,
    pub(super) computes_layer: bool,
    /// Whether the next step may begin without it.
    pub(super) is_left_behind: bool,
    pub(super) has_started: bool,
}

pub(super) struct Memory<'a> {
    pub(super) meter: Meter<'a>,
    pub(super) phases: Vec<(u64, i64)>,
    pub(super) live: i64,
    pub(super) most: i64,
}

impl<'a> Course<'a> {
    pub(super) fn new(
        program: &'a Program,
        layout: &'a Layout,
        world: &'a dyn World,
        device: usize,
        memory: bool,
    ) -> Course<'a> {
        let instructions = &program.instructions;
        let left_behind = program.left_behind();
        let compiled = instructions.iter().enumerate().all(|(place, i)| i.id as usize == place);
        let by_id: HashMap<u32, u32> = match compiled {
            true => HashMap::new(),
            false => (0u32..).zip(instructions).map(|(place, i)| (i.id, place)).collect(),
        };
        let place = |id: u32| if compiled { id } else { by_id[&id] };
        let mut slots: Vec<Slot> = Vec::with_capacity(instructions.len() + 1);
        slots.extend(instructions.iter().map(|i| Slot {
            awaits: i.after.len() as u32,
            lane: i.serial().map(|lane| lane as u8),
            line: line(&i.op).map(|line| line as u8),
            computes_layer: i.op.computes_layer(),
            ..Slot::default()
        }));
        slots.push(Slot::default());
        left_behind.iter().for_each(|place| slots[*place].is_left_behind = true);
        for id in instructions.iter().flat_map(|i| &i.after) {
            slots[place(*id) as usize + 1].first_follower += 1;
        }
        for at in 1..slots.len() {
            slots[at].first_follower += slots[at - 1].first_follower;
        }
        let mut fill: Vec<u32> = slots.iter().map(|slot| slot.first_follower).collect();
        let mut followers = vec![0u32; slots[instructions.len()].first_follower as usize];
        for (at, instruction) in (0u32..).zip(instructions) {
            for id in &instruction.after {
                let slot = &mut fill[place(*id) as usize];
                followers[*slot as usize] = at;
                *slot += 1;
            }
        }
        let ahead = instructions.iter().enumerate().filter(|(_, i)| i.ahead > 0);
        let mut early: Vec<(usize, usize)> =
            ahead.map(|(place, i)| (place.saturating_sub(i.ahead as usize), place)).collect();
        early.sort_unstable_by(|a, b| b.cmp(a));
        Course {
            program,
            number: 0,
            step: 0,
            listed_left: instructions.len() - left_behind.len(),
            listed_end: 0.0,
            followed_by: HashMap::new(),
            computations_left: slots.iter().filter(|slot| slot.computes_layer).count(),
            slots,
            followers,
            next: 0,
            early,
            may: Vec::new(),
            world,
            device,
            spans: vec![Span { start: 0.0, end: f64::NAN }; instructions.len()],
            left: instructions.len(),
            meter: memory.then(|| Memory {
                meter: Meter::new(layout, program.device),
                phases: vec![(0, 0); instructions.len()],
                live: 0,
                most: 0,
            }),
        }
    }

    /// The device, if an instruction keeps it from computing something else.
    pub(super) fn computes_on(&self, place: usize) -> Option<usize> {
        (self.program.instructions[place].lane == Lane::Compute).then_some(self.device)
    }

    /// The same once more, of one that has not begun; none where memory is followed.
    pub(super) fn again(&self) -> Option<Course<'a>> {
        self.meter.is_none().then(|| Course {
            slots: self.slots.clone(),
            followers: self.followers.clone(),
            early: self.early.clone(),
            may: Vec::new(),
            spans: self.spans.clone(),
            followed_by: HashMap::new(),
            meter: None,
            ..*self
        })
    }

    /// Goes past the closing sums without any time passing; memory is not followed. Returns how many instructions that were.
    pub(super) fn pass_closing_sums(&mut self) -> usize {
        let count = closing_place(self.program).map_or(0, |place| place + 1);
        let all = self.spans.len();
        self.spans[..count].fill(Span { start: 0.0, end: 0.0 });
        self.slots[..count].iter_mut().for_each(|slot| slot.has_started = true);
        // Those behind wait for each other alone.
        self.slots[count..all].iter_mut().for_each(|slot| slot.awaits = 0);
        let (first, last) = (self.slots[count].first_follower, self.slots[all].first_follower);
        for follower in &self.followers[first as usize..last as usize] {
            self.slots[*follower as usize].awaits += 1;
        }
        let behind = &self.slots[count..all];
        self.left = behind.len();
        self.listed_left = behind.iter().filter(|slot| !slot.is_left_behind).count();
        self.computations_left = behind.iter().filter(|slot| slot.computes_layer).count();
        self.next = count;
        self.early.retain(|(_, place)| *place >= count);
        count
    }

    fn can_start(&self, place: usize, busy: &[bool; Lane::SERIAL]) -> bool {
        let Slot { awaits, lane, .. } = self.slots[place];
        awaits == 0 && lane.is_none_or(|lane| !busy[lane as usize])
    }

    /// An instruction that can start now, with these lanes of the device busy.
    pub(super) fn startable(&mut self, busy: &[bool; Lane::SERIAL]) -> Option<usize> {
        let count = self.spans.len();
        while self.next < count && self.slots[self.next].has_started {
            self.next += 1;
        }
        while self.early.last().is_some_and(|(from, _)| *from <= self.next) {
            let place = self.early.pop().expect("there is a last").1;
            self.may.push(place);
        }
        if self.next < count && self.can_start(self.next, busy) {
            return Some(self.next);
        }
        // Those whose turn it was before they could start ahead.
        let slots = &self.slots;
        self.may.retain(|place| !slots[*place].has_started);
        let can = (0..self.may.len()).filter(|at| self.can_start(self.may[*at], busy));
        let first = can.min_by_key(|at| self.may[*at])?;
        Some(self.may.swap_remove(first))
    }

    /// Comes after updates of the step before that are not over; of all programs it is this one.
    pub(super) fn follow(&mut self, before: &mut Course, layout: &Layout, own: usize) {
        let places = before.slots.iter().zip(&before.spans).enumerate();
        let under_way = places.filter(|(_, (slot, span))| slot.is_left_behind && span.end.is_nan());
        let under_way: Vec<usize> = under_way.map(|(place, _)| place).collect();
        if under_way.is_empty() {
            return;
        }
        let mut of_tensor: HashMap<usize, Vec<usize>> = HashMap::new();
        for place in under_way {
            let tensor = before.program.instructions[place].op.updated_tensor();
            of_tensor.entry(tensor.expect("updates are left behind")).or_default().push(place);
        }
        for (place, instruction) in self.program.instructions.iter().enumerate() {
            let effects = effects(&instruction.op, layout, self.program.device);
            let updates = effects.touches().filter_map(|tensor| of_tensor.get(&tensor)).flatten();
            for update in updates {
                before.followed_by.entry(*update).or_default().push((own, place));
                self.slots[place].awaits += 1;
            }
        }
    }

    /// It waits for nothing but its turn in a line.
    pub(super) fn line_up(&mut self, place: usize) {
        self.slots[place].has_started = true;
    }

    pub(super) fn start(&mut self, place: usize, now: f64) {
        self.slots[place].has_started = true;
        self.spans[place].start = now;
        if let Some(memory) = &mut self.meter {
            let phase = memory.meter.phase(&self.program.instructions[place].op);
            memory.phases[place] = (phase.peak, phase.gain as i64 - phase.loss as i64);
            memory.live += phase.peak as i64;
            memory.most = memory.most.max(memory.live);
        }
    }

    pub(super) fn finish(&mut self, place: usize, now: f64) {
        self.spans[place].end = now;
        self.left -= 1;
        let Slot { first_follower, computes_layer, is_left_behind, .. } = self.slots[place];
        if !is_left_behind {
            self.listed_left -= 1;
            self.listed_end = now;
        }
        self.computations_left -= usize::from(computes_layer);
        let end = self.slots[place + 1].first_follower;
        for follower in &self.followers[first_follower as usize..end as usize] {
            self.slots[*follower as usize].awaits -= 1;
        }
        if let Some(memory) = &mut self.meter {
            let (peak, change) = memory.phases[place];
            memory.live += change - peak as i64;
        }
    }

    /// What the device spent its time on.
    pub(super) fn time(&self, seconds: f64) -> DeviceTime {
        let mut time = DeviceTime::default();
        for (instruction, span) in self.program.instructions.iter().zip(&self.spans) {
            if instruction.lane == Lane::Compute {
                let spent = span.end - span.start;
                match instruction.op {
                    Op::Recompute { .. } => time.recomputing += spent,
                    Op::Update { .. } => time.updating += spent,
                    _ => time.computing += spent,
                }
            }
        }
        time.idle = (seconds - time.computing - time.recomputing - time.updating).max(0.0);
        time
    }
}
