//! Where data arrives. Nobody reads a lane in the background: of the threads that wait for a message on it, one reads the
//! next header. If the frame is its own it reads on, into its caller's memory; if not, the frame waits at the head of
//! the lane for its receiver, who is waiting too, for nothing is sent that was not asked for.
//!
//! Receivers read the stripes of a message in order, lane after lane, and senders write them in that order. So nobody
//! waits in a circle: the frame that was written first of all that are unread stands at the head of its lane, and its
//! receiver, who has everything before it, waits for exactly that frame.

use std::io;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use super::spin::{Leisure, Spins};
use super::stream::{Reading, is_tick};
use crate::fabric::Tag;
use crate::link::Meanwhile;
use crate::wire::{HEADER_BYTES, Header, Violation};

pub struct Lane {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Away while a thread reads.
    source: Option<Source>,
    /// A frame whose receiver has not come yet; its payload is next on the source.
    head: Option<Header>,
    /// Threads that wait for the lane to change: without any there is nobody to wake, which would be a call of the system.
    waiting: usize,
}

/// The connection, with what has been read of the next header.
pub struct Source {
    pub reading: Reading,
    pub spins: Spins,
    header: [u8; HEADER_BYTES],
    filled: usize,
}

/// Why a lane gave no frame.
pub enum Trouble {
    /// The peer's connection, or what it sent, is at an end.
    Closed(String),
    Violation(Violation),
    /// What `go_on` said.
    Stopped,
}

impl Trouble {
    /// The peer has closed the connection.
    pub fn ended() -> Trouble {
        Trouble::Closed("its connection was closed".to_owned())
    }
}

impl Lane {
    pub fn new(reading: Reading, leisure: &Leisure) -> Lane {
        let source = Source { reading, spins: Spins::new(leisure), header: [0; HEADER_BYTES], filled: 0 };
        Lane {
            state: Mutex::new(State { source: Some(source), head: None, waiting: 0 }),
            changed: Condvar::new(),
        }
    }

    /// Waits for the next frame of a message on this lane; its payload is read from the source, which must be given
    /// back. `go_on` is asked every tick, `expected` about frames that are for others.
    pub fn next(
        &self,
        tag: Tag,
        tick: Duration,
        mut go_on: impl FnMut() -> bool,
        expected: impl Fn(&Header) -> Result<(), Violation>,
        meanwhile: &mut dyn Meanwhile,
    ) -> Result<(Header, Source), Trouble> {
        // What is done meanwhile is done without the lane, which may change then: nobody waits without another look.
        let mut idle = false;
        let mut state = self.state.lock().expect("nobody panics with a lane");
        loop {
            let waits_here = state.head.is_some_and(|head| head.tag == tag);
            match (state.source.take(), state.head) {
                (Some(source), Some(head)) if waits_here => {
                    state.head = None;
                    return Ok((head, source));
                }
                (Some(mut source), None) => {
                    drop(state);
                    let found = source.next_header(&mut go_on, meanwhile);
                    match found {
                        Ok(header) if header.tag == tag => return Ok((header, source)),
                        Ok(header) => {
                            state = self.state.lock().expect("nobody panics with a lane");
                            state.source = Some(source);
                            state.head = Some(header);
                            self.changed.notify_all();
                            expected(&header).map_err(Trouble::Violation)?;
                        }
                        Err(trouble) => {
                            self.give_back(source);
                            return Err(trouble);
                        }
                    }
                }
                (source, _) => {
                    state.source = source;
                    if !go_on() {
                        return Err(Trouble::Stopped);
                    }
                    if !idle {
                        drop(state);
                        idle = !meanwhile.advance();
                        if idle {
                            meanwhile.part();
                        }
                        state = self.state.lock().expect("nobody panics with a lane");
                        continue;
                    }
                    idle = false;
                    state.waiting += 1;
                    state = self.changed.wait_timeout(state, tick).expect("nobody panics with a lane").0;
                    state.waiting -= 1;
                }
            }
        }
    }

    pub fn give_back(&self, source: Source) {
        let mut state = self.state.lock().expect("nobody panics with a lane");
        state.source = Some(source);
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }
}

impl Source {
    fn next_header(
        &mut self,
        go_on: &mut impl FnMut() -> bool,
        meanwhile: &mut dyn Meanwhile,
    ) -> Result<Header, Trouble> {
        while self.filled < HEADER_BYTES {
            let into = &mut self.header[self.filled..];
            self.filled += read_meanwhile(&mut self.reading, &self.spins, into, go_on, meanwhile)?;
        }
        self.filled = 0;
        Header::decode(&self.header).map_err(Trouble::Violation)
    }
}

/// At least one byte, waited for as long as `go_on` says, once there is nothing to do meanwhile.
pub fn read_meanwhile(
    reading: &mut Reading,
    spins: &Spins,
    into: &mut [u8],
    go_on: &mut impl FnMut() -> bool,
    meanwhile: &mut dyn Meanwhile,
) -> Result<usize, Trouble> {
    let mut spin = spins.begin();
    loop {
        match reading.read_now(into) {
            Ok(0) => return Err(Trouble::ended()),
            Ok(count) => {
                spin.found();
                return Ok(count);
            }
            Err(error) if is_tick(&error) && (meanwhile.advance() || spin.again()) => {}
            Err(error) if is_tick(&error) => {
                meanwhile.part();
                return read_some(reading, into, go_on);
            }
            Err(error) => return Err(Trouble::Closed(closed(&error))),
        }
    }
}

/// At least one byte, waited for as long as `go_on` says.
pub fn read_some(
    reading: &mut Reading,
    into: &mut [u8],
    go_on: &mut impl FnMut() -> bool,
) -> Result<usize, Trouble> {
    loop {
        match reading.read(into) {
            Ok(0) => return Err(Trouble::ended()),
            Ok(count) => return Ok(count),
            Err(error) if is_tick(&error) => {
                if !go_on() {
                    return Err(Trouble::Stopped);
                }
            }
            Err(error) => return Err(Trouble::Closed(closed(&error))),
        }
    }
}

pub fn closed(error: &io::Error) -> String {
    format!("its connection broke: {error}")
}
