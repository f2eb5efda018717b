//! One connection, read or written by one thread at a time, plain or through TLS. Sockets wake their threads every
//! tick, so that a thread that waits sees when there is no point in it any more.

use std::io::{self, BufReader, IoSlice, Read, Write};
use std::net::TcpStream;

use rustix::net::{self, RecvFlags, SendAncillaryBuffer, SendFlags};
use rustls::{ClientConnection, ServerConnection};

/// The receiving end of a connection that a peer made.
pub enum Reading {
    Plain(TcpStream),
    /// TLS takes a few kilobytes at a time, which would be a call of the system each.
    Tls(Box<ServerConnection>, BufReader<TcpStream>),
}

impl Reading {
    pub fn tls(tls: ServerConnection, socket: TcpStream) -> Reading {
        Reading::Tls(Box::new(tls), BufReader::with_capacity(SEALED_BYTES, socket))
    }

    /// The next bytes. `WouldBlock` when a tick has passed, `Ok(0)` at the end.
    pub fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Reading::Plain(socket) => socket.read(into),
            Reading::Tls(tls, socket) => loop {
                if let Some(opened) = read_opened(tls, into) {
                    return opened;
                }
                tls.read_tls(socket)?;
                tls.process_new_packets()
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            },
        }
    }

    /// The next bytes that are here. `WouldBlock` where there are none.
    pub fn read_now(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Reading::Plain(socket) => Ok(net::recv(socket, into, RecvFlags::DONTWAIT)?.0),
            Reading::Tls(tls, socket) => {
                if let Some(opened) = read_opened(tls, into) {
                    return opened;
                }
                socket.get_ref().set_nonblocking(true)?;
                let result = self.read(into);
                let Reading::Tls(_, socket) = self else { unreachable!("it is TLS") };
                socket.get_ref().set_nonblocking(false)?;
                result
            }
        }
    }

    pub fn socket(&self) -> &TcpStream {
        match self {
            Reading::Plain(socket) => socket,
            Reading::Tls(_, socket) => socket.get_ref(),
        }
    }

    /// Says something back, which happens only while the connection is being made.
    pub fn answer(&mut self, bytes: &[u8], mut go_on: impl FnMut() -> io::Result<()>) -> io::Result<()> {
        match self {
            Reading::Plain(socket) => {
                let mut rest = bytes;
                while !rest.is_empty() {
                    rest = &rest[progress(socket.write(rest), &mut go_on)?..];
                }
            }
            Reading::Tls(tls, socket) => {
                tls.writer().write_all(bytes)?;
                while tls.wants_write() {
                    progress(tls.write_tls(socket.get_mut()), &mut go_on)?;
                }
            }
        }
        Ok(())
    }
}

/// What has been opened already, if there is any.
fn read_opened(tls: &mut ServerConnection, into: &mut [u8]) -> Option<io::Result<usize>> {
    match tls.reader().read(into) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        // An end without its notice is an end too: whether it is in order is for frames to say.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Some(Ok(0)),
        other => Some(other),
    }
}

/// The sending end of a connection that this worker made.
pub enum Writing {
    Plain(TcpStream),
    Tls(Box<ClientConnection>, TcpStream),
}

impl Writing {
    /// Writes a header and its payload whole. `go_on` is asked every tick in which nothing could be written.
    pub fn write(
        &mut self,
        header: &[u8],
        payload: &[u8],
        mut go_on: impl FnMut() -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut header, mut payload) = (header, payload);
        while !header.is_empty() || !payload.is_empty() || self.holds_back() {
            let count = progress(self.write_some(header, payload), &mut go_on)?;
            let of_header = count.min(header.len());
            header = &header[of_header..];
            payload = &payload[count - of_header..];
        }
        Ok(())
    }

    /// Takes what it can of a header and its payload, and sends what it can until a tick has passed.
    pub fn write_some(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        match self {
            Writing::Plain(socket) => {
                match socket.write_vectored(&[IoSlice::new(header), IoSlice::new(payload)])? {
                    0 => Err(io::ErrorKind::WriteZero.into()),
                    count => Ok(count),
                }
            }
            Writing::Tls(tls, socket) => {
                while tls.wants_write() {
                    tls.write_tls(socket)?;
                }
                let part = payload.len().min(SEALED_BYTES - header.len());
                let parts = [IoSlice::new(header), IoSlice::new(&payload[..part])];
                let count = tls.writer().write_vectored(&parts)?;
                while tls.wants_write() {
                    match tls.write_tls(socket) {
                        // It is taken, and goes with the next call.
                        Err(error) if is_tick(&error) => break,
                        sent => sent?,
                    };
                }
                Ok(count)
            }
        }
    }

    /// Takes what goes of a header and its payload without waiting, and sends what does.
    pub fn write_now(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        match self {
            Writing::Plain(socket) => {
                let parts = [IoSlice::new(header), IoSlice::new(payload)];
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                match net::sendmsg(socket, &parts, &mut SendAncillaryBuffer::default(), flags)? {
                    0 => Err(io::ErrorKind::WriteZero.into()),
                    count => Ok(count),
                }
            }
            Writing::Tls(_, socket) => {
                socket.set_nonblocking(true)?;
                let result = self.write_some(header, payload);
                self.socket().set_nonblocking(false)?;
                result
            }
        }
    }

    /// Whether something that was taken has not been sent yet.
    pub fn holds_back(&self) -> bool {
        match self {
            Writing::Plain(_) => false,
            Writing::Tls(tls, _) => tls.wants_write(),
        }
    }

    pub fn socket(&self) -> &TcpStream {
        match self {
            Writing::Plain(socket) | Writing::Tls(_, socket) => socket,
        }
    }
}

/// What is sealed before it is sent: four records, so that sealing and sending stay in the cache.
const SEALED_BYTES: usize = 4 * 16_384;

fn progress(written: io::Result<usize>, go_on: &mut impl FnMut() -> io::Result<()>) -> io::Result<usize> {
    match written {
        Ok(count) => Ok(count),
        Err(error) if is_tick(&error) => go_on().map(|()| 0),
        Err(error) => Err(error),
    }
}

/// Whether an error only says that time has passed.
pub fn is_tick(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}
