//! What can come over a connection, made from seeds: proper conversations, and what becomes of them when bits flip,
//! fields lie, frames are lost, doubled or out of order, or the bytes are noise. Each goes through the parser and the
//! state machine of a connection as it would arrive. A proper conversation must pass to its end; whatever else must pass
//! or be refused, without a panic and without holding more memory than the window.

use std::collections::BTreeMap;

use shoal_net::Tag;
use shoal_net::desk::{Arrival, Desk, Leave};
use shoal_net::wire::{HEADER_BYTES, Header, Kind, Violation};

/// What the state machine may hold of small messages that nobody asked for.
const WINDOW_BYTES: usize = 4 << 20;

/// How inputs ended, with their counts.
#[derive(Default)]
pub struct Outcomes(pub BTreeMap<String, u64>);

/// One step of a conversation.
#[derive(Clone)]
enum Step {
    /// A frame of the control connection.
    Control(Vec<u8>),
    /// A frame of a data stream.
    Data(Vec<u8>),
    /// This worker wants a message.
    Want(Tag, u64),
    /// This worker reads what has come of it.
    Read(Tag),
    Done(Tag),
    /// This worker has a message to send.
    Begin(Tag, u64),
}

struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

fn frame(kind: Kind, tag: Tag, total: u64, offset: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Header { kind, tag, total, offset, length: payload.len() as u32 }.encode().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

/// A conversation in which nobody breaks a rule.
fn conversation(dice: &mut Dice) -> Vec<Step> {
    let mut steps = Vec::new();
    for number in 0..1 + dice.below(5) {
        let tag = Tag((dice.next() as u128) << 8 | number as u128);
        match dice.below(6) {
            0 | 1 => eager(dice, tag, &mut steps),
            2 | 3 => wanted(dice, tag, &mut steps),
            4 => {
                // This worker sends: a small message that goes at once and is credited, and one that waits to be wanted.
                let length = dice.below(60_000) as u64;
                steps.push(Step::Begin(tag, length));
                steps.push(Step::Control(frame(Kind::Credit, Tag(0), length, 0, &[])));
                steps.push(Step::Control(frame(Kind::Ready, Tag(tag.0 ^ 1 << 7), 100_000, 0, &[])));
                steps.push(Step::Begin(Tag(tag.0 ^ 1 << 7), 100_000));
            }
            _ => steps.push(Step::Control(frame(Kind::Heartbeat, Tag(0), 0, 0, &[]))),
        }
    }
    match dice.below(4) {
        0 => steps.push(Step::Control(frame(Kind::Bye, Tag(0), 0, 0, &[]))),
        1 => steps.push(Step::Control(frame(Kind::Abort, Tag(dice.below(9) as u128), 1, 0, b"because"))),
        _ => {}
    }
    steps
}

/// A small message that comes without being asked for, wanted before, between or after its parts, or never.
fn eager(dice: &mut Dice, tag: Tag, steps: &mut Vec<Step>) {
    let total = dice.below(200) as u64;
    let parts = if total < 3 { 1 } else { 1 + dice.below(3) as u64 };
    let want_at = dice.below(5) as u64;
    for part in 0..parts {
        if part == want_at {
            steps.push(Step::Want(tag, total));
        }
        let (begin, end) = (total * part / parts, total * (part + 1) / parts);
        steps.push(Step::Control(frame(
            Kind::Eager,
            tag,
            total,
            begin,
            &vec![part as u8; (end - begin) as usize],
        )));
    }
    match want_at {
        at if at < parts => {}
        4 => return,
        _ => steps.push(Step::Want(tag, total)),
    }
    steps.extend([Step::Read(tag), Step::Done(tag)]);
}

/// A message over a data stream: large, or small and announced.
fn wanted(dice: &mut Dice, tag: Tag, steps: &mut Vec<Step>) {
    let large = dice.below(50) == 0;
    let total = if large { 66_000 } else { 1 + dice.below(300) as u64 };
    let announce = Step::Control(frame(Kind::Announce, tag, total, 0, &[]));
    if !large || dice.below(2) == 0 {
        steps.push(announce);
    }
    steps.push(Step::Want(tag, total));
    if dice.below(8) == 0 {
        // The sender has another length.
        steps.push(Step::Control(frame(Kind::Refuse, tag, total + 1, 0, &[])));
        steps.extend([Step::Read(tag), Step::Done(tag)]);
        return;
    }
    let parts = (1 + dice.below(3) as u64).min(total);
    for part in 0..parts {
        let (begin, end) = (total * part / parts, total * (part + 1) / parts);
        steps.push(Step::Data(frame(Kind::Data, tag, total, begin, &vec![0; (end - begin) as usize])));
    }
    steps.push(Step::Done(tag));
}

fn bytes_of(step: &mut Step) -> Option<&mut Vec<u8>> {
    match step {
        Step::Control(bytes) | Step::Data(bytes) if !bytes.is_empty() => Some(bytes),
        _ => None,
    }
}

/// Does one kind of harm to a conversation; false where it is left whole.
fn harm(dice: &mut Dice, steps: &mut Vec<Step>) -> bool {
    let place = dice.below(steps.len());
    match dice.below(10) {
        0 => return false,
        1 => {
            let noise: Vec<u8> = (0..dice.below(200)).map(|_| dice.next() as u8).collect();
            steps.insert(place, if dice.below(2) == 0 { Step::Control(noise) } else { Step::Data(noise) });
        }
        2 => {
            let other = dice.below(steps.len());
            steps.swap(place, other);
        }
        3 => steps.insert(place, steps[dice.below(steps.len())].clone()),
        4 => drop(steps.remove(place)),
        5 => steps.truncate(place),
        6 => {
            if let Some(bytes) = bytes_of(&mut steps[place]) {
                bytes.truncate(dice.below(bytes.len()));
            }
        }
        7 => {
            if let Some(bytes) = bytes_of(&mut steps[place]) {
                let bit = dice.below(bytes.len() * 8);
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
        8 => {
            // Onto another connection.
            let moved = match &steps[place] {
                Step::Control(bytes) => Step::Data(bytes.clone()),
                Step::Data(bytes) => Step::Control(bytes.clone()),
                other => other.clone(),
            };
            steps[place] = moved;
        }
        _ => forge(dice, &mut steps[place]),
    }
    true
}

/// A header that lies, with a checksum that does not show it.
fn forge(dice: &mut Dice, step: &mut Step) {
    let Some(bytes) = bytes_of(step) else { return };
    let Some((head, _)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return };
    let Ok(mut header) = Header::decode(head) else { return };
    let number = match dice.below(4) {
        0 => dice.next(),
        1 => u64::MAX - dice.below(3) as u64,
        2 => dice.below(70_000) as u64,
        _ => dice.below(4) as u64,
    };
    match dice.below(4) {
        0 => header.total = number,
        1 => header.offset = number,
        2 => header.length = number as u32,
        _ => header.tag = Tag(number as u128),
    }
    bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
}

/// A connection's bytes that have not made a frame yet.
#[derive(Default)]
struct Stream(Vec<u8>);

impl Stream {
    /// The frames that are whole with these bytes.
    fn feed(
        &mut self,
        bytes: &[u8],
        mut each: impl FnMut(&Header, Vec<u8>) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        self.0.extend_from_slice(bytes);
        while let Some((head, rest)) = self.0.split_first_chunk::<HEADER_BYTES>() {
            let header = Header::decode(head)?;
            let Some(payload) = rest.get(..header.length as usize) else { break };
            let payload = payload.to_vec();
            self.0.drain(..HEADER_BYTES + payload.len());
            each(&header, payload)?;
        }
        Ok(())
    }
}

/// Plays one conversation; how it ended.
fn play(steps: &[Step]) -> String {
    let mut desk = Desk::default();
    let (mut control, mut data) = (Stream::default(), Stream::default());
    for step in steps {
        let heard = match step {
            Step::Control(bytes) => {
                control.feed(bytes, |header, payload| desk.accept(header, payload).map(drop))
            }
            Step::Data(bytes) => data.feed(bytes, |header, _| {
                desk.expects_data(header)?;
                desk.take_data(header)
            }),
            Step::Want(tag, length) => {
                // A tag that is in use is this worker's own mistake, and refused.
                let _ = desk.want(*tag, *length);
                Ok(())
            }
            Step::Read(tag) => {
                while let (Arrival::Piece(_), _) = desk.look(*tag) {}
                Ok(())
            }
            Step::Done(tag) => {
                desk.done(*tag);
                Ok(())
            }
            Step::Begin(tag, length) => {
                let leave = desk.begin(*tag, *length, false);
                assert!(leave != Leave::Eager || *length <= 1 << 16, "only small messages go unasked");
                Ok(())
            }
        };
        assert!(desk.inbox_bytes() <= WINDOW_BYTES, "the inbox is bounded");
        if let Err(violation) = heard {
            let name = format!("{violation:?}");
            return format!("refused: {}", name.split(['(', ' ', '{']).next().unwrap_or_default());
        }
    }
    let half = !control.0.is_empty() || !data.0.is_empty();
    if half { "ended in the middle of a frame".to_owned() } else { "passed".to_owned() }
}

/// Runs inputs from these seeds.
pub fn run(seeds: std::ops::Range<u64>) -> Outcomes {
    let mut outcomes = Outcomes::default();
    for seed in seeds {
        let mut dice = Dice(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let mut steps = conversation(&mut dice);
        let mut harmed = false;
        for _ in 0..1 + dice.below(3) {
            harmed |= !steps.is_empty() && harm(&mut dice, &mut steps);
        }
        let outcome = play(&steps);
        assert!(harmed || outcome == "passed", "seed {seed}: a proper conversation {outcome}");
        let kind = if harmed { "harmed" } else { "proper" };
        *outcomes.0.entry(format!("{kind}, {outcome}")).or_default() += 1;
    }
    outcomes
}
