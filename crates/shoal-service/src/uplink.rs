//! A worker's connection to its controller: made again whenever it breaks, with growing pauses. What is said while there is
//! none is dropped; the state machine says it again.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use rustls::ClientConfig;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Error as SocketError, Message};
use tokio_tungstenite::{WebSocketStream, client_async_with_config};

use crate::api::{WORKER_HEADER, refusal_of};
use crate::error::{Error, Result};
use crate::http::{Failure, Stream, Target, open};
use crate::wire::{self, DOWN_BYTES_MAX, Down, READ_BYTES, Up};
use crate::worker_driver::Happening;

const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Messages that wait to be sent.
const UP_MAX: usize = 256;
/// The controller answers every report. One that has not for so long is not there any more.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// The worker's end. The connection ends when this does.
pub struct Uplink {
    to: mpsc::Sender<Up>,
    /// There is no connection before then: for drills.
    cut_until: watch::Sender<Instant>,
}

impl Uplink {
    pub fn start(
        target: Target,
        tls: Arc<ClientConfig>,
        name: String,
        happenings: Sender<Happening>,
    ) -> Result<Uplink> {
        let (to, from) = mpsc::channel(UP_MAX);
        let (cut_until, cut) = watch::channel(Instant::now());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::Unreachable { url: target.to_string(), cause: error.to_string() })?;
        std::thread::spawn(move || runtime.block_on(keep_up(target, tls, name, (from, cut), happenings)));
        Ok(Uplink { to, cut_until })
    }

    /// Whether it is on its way. Where the connection is down or slow it is not, and has to be said again.
    pub fn say(&self, up: Up) -> bool {
        self.to.try_send(up).is_ok()
    }

    /// Breaks the connection, and makes none for so long.
    pub fn cut(&self, lasting: Duration) {
        self.cut_until.send_replace(Instant::now() + lasting);
    }
}

async fn keep_up(
    target: Target,
    tls: Arc<ClientConfig>,
    name: String,
    (mut from, mut cut): (mpsc::Receiver<Up>, watch::Receiver<Instant>),
    happenings: Sender<Happening>,
) {
    let mut pause = PAUSE_MIN;
    loop {
        let cut_until = *cut.borrow_and_update();
        sleep_until(cut_until).await;
        match timeout(CONNECT_MAX, connect(&target, &tls, &name)).await {
            Ok(Ok(socket)) => {
                pause = PAUSE_MIN;
                while from.try_recv().is_ok() {}
                if happenings.send(Happening::Connected).is_err() {
                    return;
                }
                if pass(socket, &mut from, &mut cut, &happenings).await.is_err() {
                    return;
                }
                let _ = happenings.send(Happening::Disconnected);
            }
            failed => {
                let error = failed.map_or_else(
                    |_| Failure::Unreachable("no answer".into()).at(&target),
                    |failed| failed.err().unwrap_or(Error::NewSettings),
                );
                if happenings.send(Happening::NotConnected(error)).is_err() {
                    return;
                }
            }
        }
        if from.is_closed() {
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// One connection, as the worker of that name.
pub async fn connect(
    target: &Target,
    tls: &Arc<ClientConfig>,
    name: &str,
) -> Result<WebSocketStream<Stream>> {
    let stream = open(target, Some(tls)).await.map_err(|failure| failure.at(target))?;
    let wrong = |cause: String| Error::Answer { url: target.to_string(), cause };
    let url = format!("wss://{}/api/v1/channel", target.authority());
    let mut request = url.into_client_request().map_err(|error| wrong(error.to_string()))?;
    let value = name.parse().map_err(|_| wrong("the worker's name is no header".into()))?;
    request.headers_mut().insert(WORKER_HEADER, value);
    let config = WebSocketConfig::default()
        .max_message_size(Some(DOWN_BYTES_MAX))
        .max_frame_size(Some(DOWN_BYTES_MAX))
        .read_buffer_size(READ_BYTES);
    match client_async_with_config(request, stream, Some(config)).await {
        Ok((socket, _)) => Ok(socket),
        Err(SocketError::Http(response)) => {
            let body = response.body().as_deref().unwrap_or_default();
            Err(refusal_of(response.status().as_u16(), body).into())
        }
        Err(error) => Err(Failure::Unreachable(error.to_string()).at(target)),
    }
}

/// Until the connection breaks; an error means that nobody listens on this side any more.
async fn pass(
    mut socket: WebSocketStream<Stream>,
    from: &mut mpsc::Receiver<Up>,
    cut: &mut watch::Receiver<Instant>,
    happenings: &Sender<Happening>,
) -> std::result::Result<(), ()> {
    loop {
        tokio::select! {
            up = from.recv() => {
                let Some(up) = up else {
                    let _ = timeout(CONNECT_MAX, socket.close(None)).await;
                    return Err(());
                };
                let text = serde_json::to_string(&up).expect("messages are JSON");
                match timeout(SILENCE_MAX, socket.send(Message::text(text))).await {
                    Ok(Ok(())) => {}
                    _ => return Ok(()),
                }
            }
            // Without a word to the other side.
            Ok(()) = cut.changed() => return Ok(()),
            heard = timeout(SILENCE_MAX, socket.next()) => {
                let text = match heard {
                    Ok(Some(Ok(Message::Text(text)))) => text,
                    Ok(Some(Ok(Message::Ping(_) | Message::Pong(_)))) => continue,
                    _ => return Ok(()),
                };
                // What cannot be read comes from another version, or from nobody we know.
                let Ok(down) = wire::down(&text) else { return Ok(()) };
                let happening = match down {
                    Down::Settings(settings) => Happening::Settings(settings),
                    Down::Control(message) => Happening::Heard(Box::new(message)),
                    Down::Kept { job, steps } => Happening::Kept { job, steps },
                    Down::Drill(drill) => Happening::Drill(drill),
                };
                happenings.send(happening).map_err(|_| ())?;
            }
        }
    }
}
