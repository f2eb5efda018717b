//! The receiving end of a control connection. Whoever waits for a word of the peer listens itself: to be woken by somebody
//! else who does takes tens of microseconds, which is more than most words are away. A thread of its own listens only while
//! nobody waits.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::lane::{Trouble, closed};
use super::stream::{Reading, is_tick};
use crate::wire::{HEADER_BYTES, Header};

pub struct Ear {
    reading: Reading,
    /// When something last came.
    heard: Instant,
    header: [u8; HEADER_BYTES],
    /// The frame whose payload comes next, once its header is whole.
    begun: Option<(Header, Vec<u8>)>,
    /// Bytes that have come of the header, or of the payload.
    filled: usize,
}

impl Ear {
    pub fn new(reading: Reading) -> Ear {
        Ear { reading, heard: Instant::now(), header: [0; HEADER_BYTES], begun: None, filled: 0 }
    }

    /// For how long nothing has come.
    pub fn silence(&self) -> Duration {
        self.heard.elapsed()
    }

    /// The next frame, if it is whole before that much time has passed. What came of it stays here otherwise.
    pub fn next(&mut self, patience: Duration) -> Result<Option<(Header, Vec<u8>)>, Trouble> {
        let until = (!patience.is_zero()).then(|| Instant::now() + patience);
        loop {
            let into = match &mut self.begun {
                Some((_, payload)) => &mut payload[self.filled..],
                None => &mut self.header[self.filled..],
            };
            match self.reading.read_now(into) {
                Ok(0) => return Err(Trouble::ended()),
                Ok(count) => {
                    self.heard = Instant::now();
                    if let Some(frame) = self.take(count)? {
                        return Ok(Some(frame));
                    }
                }
                Err(error) if is_tick(&error) => {
                    let left =
                        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()));
                    if left.is_zero() {
                        return Ok(None);
                    }
                    self.sleep(left);
                }
                Err(error) => return Err(Trouble::Closed(closed(&error))),
            }
        }
    }

    /// So many bytes have come; the frame, if they were its last.
    fn take(&mut self, count: usize) -> Result<Option<(Header, Vec<u8>)>, Trouble> {
        self.filled += count;
        if self.begun.is_none() && self.filled == HEADER_BYTES {
            let header = Header::decode(&self.header).map_err(Trouble::Violation)?;
            self.begun = Some((header, vec![0; header.length as usize]));
            self.filled = 0;
        }
        let filled = self.filled;
        let whole = self.begun.take_if(|(_, payload)| payload.len() == filled);
        if whole.is_some() {
            self.filled = 0;
        }
        Ok(whole)
    }

    /// Until something comes, or that much time has passed. A signal may end it earlier, which is as good as time.
    fn sleep(&self, time: Duration) {
        let socket = self.reading.socket();
        let limit = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
        let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&limit));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::fabric::Tag;
    use crate::wire::Kind;

    const LONG: Duration = Duration::from_secs(10);

    fn pair() -> (TcpStream, Ear) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is there");
        let writing = TcpStream::connect(listener.local_addr().expect("it listens")).expect("it listens");
        let (reading, _) = listener.accept().expect("somebody came");
        (writing, Ear::new(Reading::Plain(reading)))
    }

    #[test]
    fn frames_come_in_any_pieces_and_one_at_a_time() {
        let (mut writing, mut ear) = pair();
        assert!(matches!(ear.next(Duration::ZERO), Ok(None)), "a look does not wait");
        let eager = Header { kind: Kind::Eager, tag: Tag(7), total: 3, offset: 0, length: 3 };
        let bytes: Vec<u8> = eager.encode().into_iter().chain([1, 2, 3]).collect();
        // One byte short, looked at after each: what came stays.
        for byte in &bytes[..bytes.len() - 1] {
            writing.write_all(&[*byte]).expect("it is taken");
            assert!(matches!(ear.next(Duration::from_millis(1)), Ok(None)));
        }
        // The last, and another frame with it.
        let heartbeat = Header::new(Kind::Heartbeat);
        writing.write_all(&[&bytes[bytes.len() - 1..], &heartbeat.encode()].concat()).expect("it is taken");
        let Ok(Some((header, payload))) = ear.next(LONG) else { panic!("the frame is whole") };
        assert_eq!((header, payload), (eager, vec![1, 2, 3]));
        let Ok(Some((header, payload))) = ear.next(LONG) else { panic!("so is the next") };
        assert_eq!((header, payload), (heartbeat, vec![]));
        drop(writing);
        assert!(matches!(ear.next(LONG), Err(Trouble::Closed(_))));
    }

    #[test]
    fn what_is_no_frame_is_said_to_be_none() {
        let (mut writing, mut ear) = pair();
        writing.write_all(&[0xff; HEADER_BYTES]).expect("it is taken");
        assert!(matches!(ear.next(LONG), Err(Trouble::Violation(_))));
    }
}
