//! State from those who have it, as the difference of two tables. Everyone concerned derives the same list of messages from
//! the two tables, so nobody asks for anything: senders send, tensor by tensor and role by role, and receivers read in the
//! same order into the room that the new table gives them. What lies on this worker already never touches the network.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use shoal_control::message::WorkerId;
use shoal_engine::error::Result as EngineResult;
use shoal_engine::state::{Held, PARAMETER};
use shoal_engine::{EngineError, LossScale, ModelState, Tiers};
use shoal_model::{Chain, Precision, TensorSpec};
use shoal_net::{Fabric, Tag};
use shoal_plan::difference::{Difference, Move};
use shoal_plan::{Plan, Slice};

use crate::error::{CrewError, Result};
use crate::peers::Peers;
use crate::share::Share;
use crate::table::name_of;

/// Elements of a tensor that pass between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    tensor: usize,
    slice: Slice,
    from: WorkerId,
    to: WorkerId,
    /// Parameters alone, for a copy to compute with.
    only_parameters: bool,
}

impl Piece {
    fn tag(&self, part: usize) -> Tag {
        Tag((self.tensor as u128) << 72 | (part as u128) << 64 | self.slice.start as u128)
    }
}

/// The loss scale's message.
const SCALE: Tag = Tag(u128::MAX);

/// All that passes between workers when one plan gives way to another.
pub struct Transfer {
    own: WorkerId,
    pieces: Vec<Piece>,
    /// Who tells the loss scale, and whom.
    scale: Option<(WorkerId, Vec<WorkerId>)>,
}

impl Transfer {
    /// From the plan that these of its members still have, to another, both with devices named after their workers.
    pub fn new(
        before: &Plan,
        after: (&Plan, &[WorkerId]),
        alive: &[WorkerId],
        own: WorkerId,
    ) -> Result<Transfer> {
        let (after, members) = after;
        let ids: BTreeMap<String, WorkerId> =
            alive.iter().chain(members).map(|worker| (name_of(*worker), *worker)).collect();
        let living: BTreeSet<String> = alive.iter().map(|worker| name_of(*worker)).collect();
        let is_there = |name: &str| living.contains(name);
        let difference = Difference::new(before, after, is_there);
        if let Some((tensor, slice)) = difference.lost.first() {
            let first = format!("{} {}..{}", after.tensors[*tensor].tensor, slice.start, slice.end);
            return Err(CrewError::Lost { slices: difference.lost.len(), first });
        }
        let mut pieces: Vec<Piece> = Vec::new();
        let copies = Difference::copies(before, after, is_there);
        let moves = difference.moves.iter().map(|moved| (moved, false));
        for (Move { tensor, slice, from, to }, only_parameters) in
            moves.chain(copies.iter().map(|moved| (moved, true)))
        {
            let (from, to) = (ids[&from.device], ids[&to.device]);
            // Two memories of a worker get what comes to it once.
            let again =
                |other: &Piece| (other.tensor, other.slice, other.to) == (*tensor, *slice, to) && from != to;
            if from != to && !pieces.iter().rev().take_while(|other| other.tensor == *tensor).any(again) {
                pieces.push(Piece { tensor: *tensor, slice: *slice, from, to, only_parameters });
            }
        }
        pieces.sort_unstable();
        let newcomers: Vec<WorkerId> =
            members.iter().copied().filter(|member| !alive.contains(member)).collect();
        let is_scaled = after.precision == Precision::Fp16 && !newcomers.is_empty();
        let scale = alive.first().filter(|_| is_scaled).map(|first| (*first, newcomers));
        Ok(Transfer { own, pieces, scale })
    }

    /// Those between whom anything passes, in the order of their numbers.
    pub fn concerned(&self) -> Vec<WorkerId> {
        let of_pieces = self.pieces.iter().flat_map(|piece| [piece.from, piece.to]);
        let of_scale = self.scale.iter().flat_map(|(from, to)| to.iter().chain([from]).copied());
        of_pieces.chain(of_scale).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Those of them between whom and this worker anything does.
    pub fn partners(&self) -> BTreeSet<WorkerId> {
        let of_pieces = self.pieces.iter().map(|piece| (piece.from, piece.to));
        let of_scale = self.scale.iter().flat_map(|(from, to)| to.iter().map(|to| (*from, *to)));
        let other = |(from, to): (WorkerId, WorkerId)| match self.own {
            own if own == from => Some(to),
            own if own == to => Some(from),
            _ => None,
        };
        of_pieces.chain(of_scale).filter_map(other).collect()
    }

    /// Sends what is to be sent, and sets the new state if there is one here. What was held is only read. The loss scale that
    /// the state goes with comes back.
    pub fn carry_out(
        &self,
        fabric: Option<&Arc<Fabric>>,
        peers: &Peers,
        work: Filling,
    ) -> Result<Option<LossScale>> {
        let Filling { held, new, chain, states, step } = work;
        let by_tensor = |mine: &dyn Fn(&Piece) -> bool| {
            let mut pieces: BTreeMap<usize, Vec<Piece>> = BTreeMap::new();
            for piece in self.pieces.iter().filter(|piece| mine(piece)) {
                pieces.entry(piece.tensor).or_default().push(*piece);
            }
            pieces
        };
        let incoming = by_tensor(&|piece| piece.to == self.own);
        let receivers: BTreeSet<WorkerId> =
            self.pieces.iter().filter(|piece| piece.from == self.own).map(|piece| piece.to).collect();
        let line = |worker: WorkerId| Line { fabric, rank: peers.rank_of(worker) };
        std::thread::scope(|scope| {
            let senders: Vec<_> = receivers
                .iter()
                .map(|to| {
                    let outgoing = by_tensor(&|piece| piece.from == self.own && piece.to == *to);
                    let line = line(*to);
                    scope.spawn(move || {
                        let sent = send_all(line, held, &outgoing, states.len());
                        line.end_if_failed(&sent);
                        sent
                    })
                })
                .collect();
            let scaled = self.pass_scale(held, line);
            let filled = match new {
                None => Ok(()),
                Some((state, tiers)) => {
                    let mut gathering = Gathering {
                        held,
                        incoming: &incoming,
                        line: &line,
                        chain,
                        states,
                        last: None,
                        first: None,
                    };
                    // Whose values are asked for once: a copy beside a slice on the host asks again.
                    let once = |held: &Held| {
                        held.slices.len() == 1 && (held.copy.is_none() || held.whole().is_some())
                    };
                    let whole: Vec<bool> = state.tensors.iter().map(once).collect();
                    let read = |spec: &TensorSpec, role: &'static str, range, out: &mut [f32]| {
                        gathering.read(spec, role, range, out, &whole)
                    };
                    state.load_ranges(tiers, chain, states, step, read)
                }
            };
            Line { fabric, rank: None }.end_if_failed(&filled);
            let mut result = filled;
            for sender in senders {
                let sent = sender.join().expect("sending does not panic");
                result = result.and(sent);
            }
            result.map_err(|error| failure(error, fabric, peers))?;
            scaled.map_err(|error| failure(error, fabric, peers))
        })
    }

    /// Tells the loss scale to those who cannot know it, or hears it.
    fn pass_scale<'a>(
        &self,
        held: Option<&Share>,
        line: impl Fn(WorkerId) -> Line<'a>,
    ) -> EngineResult<Option<LossScale>> {
        let own = held.and_then(|share| share.loss_scale);
        match &self.scale {
            Some((from, to)) if *from == self.own => {
                let bytes = own.unwrap_or_default().to_bytes();
                to.iter().try_for_each(|worker| line(*worker).send(SCALE, &bytes))?;
                Ok(own)
            }
            Some((from, to)) if to.contains(&self.own) => {
                let mut bytes = [0; LossScale::BYTES];
                line(*from).receive(SCALE, &mut bytes)?;
                Ok(Some(LossScale::from_bytes(bytes)))
            }
            _ => Ok(own),
        }
    }
}

/// What a transfer works on here.
pub struct Filling<'a> {
    /// The state of the plan before.
    pub held: Option<&'a Share>,
    /// Room for the new one's.
    pub new: Option<(&'a mut ModelState, &'a Tiers)>,
    pub chain: &'a Chain,
    pub states: &'a [&'static str],
    pub step: u64,
}

/// What a failure means. The fabric's own reason is the first there was.
fn failure(error: EngineError, fabric: Option<&Arc<Fabric>>, peers: &Peers) -> CrewError {
    let fabric = fabric.map(|fabric| &**fabric);
    match error {
        EngineError::Net(error) => {
            let first = fabric.and_then(Fabric::failure).unwrap_or(error);
            peers.broken_off(first, fabric)
        }
        other => other.into(),
    }
}

/// The way to one worker.
#[derive(Clone, Copy)]
struct Line<'a> {
    fabric: Option<&'a Arc<Fabric>>,
    rank: Option<usize>,
}

impl Line<'_> {
    fn ends(&self) -> EngineResult<(&Fabric, usize)> {
        let alone = || EngineError::Movement { instruction: "the movement of state".into() };
        Ok((self.fabric.ok_or_else(alone)?, self.rank.ok_or_else(alone)?))
    }

    fn send(&self, tag: Tag, bytes: &[u8]) -> EngineResult {
        let (fabric, rank) = self.ends()?;
        Ok(fabric.send(rank, tag, bytes)?)
    }

    fn receive(&self, tag: Tag, into: &mut [u8]) -> EngineResult {
        let (fabric, rank) = self.ends()?;
        Ok(fabric.receive(rank, tag, into)?)
    }

    /// Whoever waits for this worker then ends too.
    fn end_if_failed(&self, result: &EngineResult) {
        if let (Err(error), Some(fabric)) = (result, self.fabric) {
            fabric.abort(&error.to_string());
        }
    }
}

fn send_all(
    line: Line,
    held: Option<&Share>,
    outgoing: &BTreeMap<usize, Vec<Piece>>,
    states: usize,
) -> EngineResult {
    for (tensor, pieces) in outgoing {
        for part in 0..=states {
            for piece in pieces.iter().filter(|piece| part == 0 || !piece.only_parameters) {
                let missing =
                    || EngineError::Torn { tensor: format!("tensor {tensor}, to be sent from here") };
                let values = held.ok_or_else(missing)?.read_slice(*tensor, piece.slice, part)?;
                line.send(piece.tag(part), bytemuck::cast_slice(&values))?;
            }
        }
    }
    Ok(())
}

/// Tensors as they come together here, from what is held and what comes, each element once. Room in two memories is set
/// from the same values, and so is a copy to compute with: the last ones are kept for it.
struct Gathering<'a, L> {
    held: Option<&'a Share>,
    incoming: &'a BTreeMap<usize, Vec<Piece>>,
    line: &'a L,
    chain: &'a Chain,
    states: &'a [&'static str],
    last: Option<((usize, usize), Vec<f32>)>,
    /// The parameters of the tensor that was last begun.
    first: Option<(usize, Vec<f32>)>,
}

impl<'a, L: Fn(WorkerId) -> Line<'a>> Gathering<'a, L> {
    fn read(
        &mut self,
        spec: &TensorSpec,
        role: &'static str,
        range: std::ops::Range<usize>,
        out: &mut [f32],
        only_one: &[bool],
    ) -> EngineResult {
        let tensor = self.chain.tensors.iter().position(|other| other.name == spec.name);
        let tensor = tensor.ok_or_else(|| EngineError::Torn { tensor: spec.name.clone() })?;
        let state = self.states.iter().position(|name| *name == role);
        let part = if role == PARAMETER { 0 } else { 1 + state.unwrap_or_default() };
        if only_one[tensor] && out.len() == spec.elements() {
            return self.gather(tensor, part, out);
        }
        let is_first = part == 0 && self.first.as_ref().is_some_and(|(first, _)| *first == tensor);
        let is_last = self.last.as_ref().is_some_and(|(key, _)| *key == (tensor, part));
        if !is_first && !is_last {
            let mut whole = vec![0.0; spec.elements()];
            self.gather(tensor, part, &mut whole)?;
            match part {
                0 => (self.first, self.last) = (Some((tensor, whole)), None),
                _ => self.last = Some(((tensor, part), whole)),
            }
        }
        let whole = match part {
            0 => self.first.as_ref().map(|(_, whole)| whole),
            _ => self.last.as_ref().map(|(_, whole)| whole),
        };
        out.copy_from_slice(&whole.expect("it was just gathered")[range]);
        Ok(())
    }

    /// What is held of a tensor in a role, and what comes of it.
    fn gather(&self, tensor: usize, part: usize, whole: &mut [f32]) -> EngineResult {
        if let Some(share) = self.held {
            for (place, slice) in share.slices(tensor).into_iter().enumerate() {
                let values = share.read(tensor, place, part)?;
                whole[slice.range()].copy_from_slice(&values);
            }
        }
        for piece in self.incoming.get(&tensor).into_iter().flatten() {
            if part == 0 || !piece.only_parameters {
                let room = &mut whole[piece.slice.range()];
                (self.line)(piece.from).receive(piece.tag(part), bytemuck::cast_slice_mut(room))?;
            }
        }
        Ok(())
    }
}
