"""The vocabulary of the demo corpus: hand-written word lists, their derived forms and their syllables.

Lists hold base forms; plurals, verb forms and adverbs are derived. A part of speech is one letter, as in the
line patterns of `demo_corpus`: n noun, m plural, a adjective, v verb in the 3rd person, w verb base form,
g -ing form, d adverb.
"""

import re
from functools import cache

TOPICS = """
rain: drop puddle umbrella gutter drizzle cloud
snow: flake sled drift mitten silence slope
wind: gust sail kite leaf breeze whistle
fog: mist lantern harbor horn veil morning
frost: window crystal blade breath pane glitter
thunder: storm drum rumble sky echo valley
lightning: flash bolt cloud spark night tower
sunrise: dawn horizon gold rooster light east
sunset: dusk horizon amber west ember shadow
twilight: dusk star hush lamp bat violet
moon: crater tide night glow orbit lantern
stars: night galaxy spark sky telescope distance
comet: tail orbit ice ember telescope wanderer
ocean: wave tide salt whale current depth
river: bank stone current bridge reed ferry
lake: mirror shore canoe loon ripple dock
pond: frog lily dragonfly ripple heron reed
waterfall: spray cliff pool roar mist rainbow
island: palm shore lagoon raft castaway reef
beach: sand shell wave towel pebble gull
desert: dune camel cactus mirage oasis heat
mountain: peak summit ridge boulder eagle trail
valley: meadow stream echo village shepherd mist
forest: pine moss fern owl path shadow
jungle: vine parrot monkey jaguar orchid drum
meadow: clover bee daisy grass cricket lark
garden: rose spade seed gate beetle soil
orchard: apple ladder blossom branch basket bee
farm: barn hay tractor rooster fence furrow
vineyard: grape vine trellis barrel cellar harvest
winter: ice scarf snow hearth coat silence
spring: bud blossom robin rain lamb nest
summer: heat cicada peach picnic sun lemonade
autumn: leaf acorn pumpkin harvest bonfire maple
harvest: wheat sickle moon basket barn grain
cat: whisker paw purr tail windowsill yarn
dog: bark leash bone tail paw stick
horse: mane saddle hoof gallop stable bridle
cow: pasture milk bell barn calf cud
sheep: wool shepherd flock lamb fence pasture
wolf: howl pack den snow fang moon
fox: den tail henhouse thicket cunning paw
bear: honey cave paw salmon den berry
deer: antler fawn clearing hoof thicket meadow
rabbit: burrow carrot clover whisker ear thump
mouse: cheese whisker cellar crumb attic tail
owl: feather hoot branch night talon barn
crow: feather caw wire field scarecrow wing
eagle: talon cliff feather summit wing nest
sparrow: crumb hedge chirp wing nest branch
heron: reed marsh patience pond wing stilt
bee: honey hive nectar pollen clover buzz
butterfly: wing petal cocoon nectar flutter meadow
spider: web thread silk corner fly dew
ant: hill crumb march tunnel queen soldier
cricket: chirp hearth grass night fiddle song
firefly: glow jar lantern dusk spark meadow
frog: pond croak lily puddle tongue reed
turtle: shell log pond patience beach egg
snake: scale coil grass tongue stone desert
fish: fin scale net stream hook bubble
whale: song ocean spout fluke depth harpoon
dolphin: fin wave leap bay sailor echo
crab: claw shell tide rock beach pincer
tree: root bark branch ring canopy trunk
oak: acorn trunk bark squirrel shade root
willow: branch river curtain catkin sorrow bank
bamboo: grove shoot panda stalk flute wind
cherry: blossom branch pit petal basket pie
rose: thorn petal bouquet garden scent bud
lily: petal pond pad altar bulb vase
tulip: bulb petal stem windmill field garden
mushroom: cap spore log moss forest stew
moss: stone shade log velvet temple forest
stone: pebble moss wall quarry river cairn
mirror: glass face reflection frame hallway silver
window: pane curtain sill glass view shutter
door: hinge key latch threshold knob hallway
house: roof porch chimney attic key wall
kitchen: kettle spoon stove apron flour table
bread: oven crust flour loaf butter baker
tea: kettle cup steam leaf saucer lemon
coffee: cup bean steam morning spoon roast
soup: bowl spoon broth onion ladle steam
honey: jar bee spoon comb toast amber
apple: core orchard seed pie cider worm
lemon: peel rind tree sugar pitcher sting
clock: tick hour pendulum hand chime tower
book: page spine shelf library chapter story
letter: envelope stamp ink postman pen page
library: shelf book hush lamp page ladder
school: desk chalk bell teacher lesson recess
teacher: lesson chalk apple question desk pupil
music: melody note drum chord song rhythm
piano: key hammer chord pedal melody bench
violin: bow string rosin melody fiddle case
drum: beat rhythm stick skin parade thunder
dance: step rhythm slipper partner floor waltz
train: rail whistle station ticket tunnel engine
ship: sail anchor harbor captain mast deck
boat: oar harbor rope hull lake lantern
bicycle: wheel pedal bell chain spoke hill
airplane: wing runway cloud pilot engine ticket
bridge: river arch span cable toll shadow
road: mile dust stone traveler bend signpost
city: street tower neon subway crowd window
village: well church lane baker roof goat
market: stall basket fruit coin fish spice
temple: bell incense monk stone gate lantern
castle: moat tower banner knight drawbridge crown
king: crown throne castle sword feast robe
dragon: scale cave fire treasure wing smoke
ghost: attic sheet whisper hallway candle chill
dream: pillow sleep cloud night door wish
sleep: pillow blanket dream yawn lullaby night
memory: photograph attic album echo scent childhood
childhood: swing marble kite knee bicycle treehouse
grandmother: shawl quilt kettle recipe thimble rocker
mother: lullaby hand apron cradle kitchen voice
father: workshop hat hammer shoulder razor voice
baby: cradle rattle blanket toe giggle bottle
friend: laughter secret bench letter hand campfire
love: heart letter ring kiss flame promise
loss: grave silence chair tear ash photograph
hope: seed candle dawn feather door anchor
courage: sword lion cliff storm heart soldier
anger: fist storm flame door thunder fire
joy: laughter bell dance ribbon song sun
silence: snow monk breath library stone pause
solitude: cabin candle shore lighthouse moon bench
patience: heron fisherman stone seed snail clock
time: hour clock river sand calendar wheel
war: soldier drum trench flag cannon grave
peace: dove olive river treaty bell harvest
computer: screen cable keyboard cursor code signal
robot: gear wire sensor metal battery circuit
code: bug loop cursor compiler keyboard screen
night: owl star lamp shadow cricket moon
morning: dew rooster coffee light robin kettle
midnight: clock bell shadow owl train moon
candle: wick wax flame moth match shadow
fire: ember ash smoke log spark flame
lighthouse: beam keeper rock ship foam stair
fisherman: net boat hook pier dawn catch
traveler: map boot road inn lantern satchel
baker: oven dough apron flour roll dawn
soldier: boot helmet letter trench flag march
painter: brush canvas easel color palette studio
baseball: glove bat diamond pitcher inning bleacher
paper: crane fold ink scissors page boat
"""

NOUNS = """
acre alley almond altar anthem antique apron arbor arrow atlas aunt avalanche axe badge bagel balcony ballad
balloon banjo banner barge basil bather beacon beak bean beard bell berry birch bird bishop blanket blizzard
blueberry boot border bottle boulder bowl box bracelet bread brick bride brook broom brother bucket buckle
bull bundle butter button cabbage cabin cactus cake calendar camera camp canal candy canvas canyon caravan
cargo carpenter carpet cart cathedral cedar ceiling cello century chain chalk chapel chariot cherry chestnut
child chimney chisel choir cinder cinema circle citizen clay cliff cloak clown coal coast cobweb coin collar
compass copper coral corn cottage cotton cousin cradle crane crate creek crocodile cross crown cup curtain
cushion cypress daffodil dagger dancer daughter daylight deck delta diary dinner dirt ditch doctor doll donkey
dove doorway dress driver duck duel dust dwarf earring earth easel eel elbow elephant elk elm emerald emperor
empire engine error evening evergreen eyelash fable falcon farmer feast feather fence fern festival fiddle fig
finger fjord flag flamingo flare flask flint flood flower flute foal foam foot forge fork fossil fountain
freckle freight fruit funeral furnace galaxy gallery garlic garnet gate gazelle geyser giant ginger giraffe
glacier glass glove goat goblet goose gorge gown grain granite grape gravel grove guard guest guitar gull hail
hammer hammock handle harbor hare harp hat hawk hay hazel headland heart hearth heather hedge hemlock herb
hermit highway hill hinge hornet hospital hotel hour hunter hurricane iceberg icicle idea infant ink insect
iris iron ivory ivy jacket jade jar jasmine jewel journal journey judge jug juniper kettle kernel kitten knee
knife knot ladder lagoon lamb lamp lane lantern larch laundry lavender lawn leather legend leopard lettuce
lilac limb lime linen lizard lobster lock locket locust loft log loom lotus lullaby lumber lyric magnet magpie
mammoth mango mansion map maple marble mare mask mast mattress medal melon merchant meteor mill miner mint
minute mole monsoon monument moth motor mule mural museum mustard nail napkin needle neighbor nephew nest net
nickel niece nightfall nightingale noodle noon notebook number nurse oar oat octopus oil olive omen onion opal
orange orchid otter oven oyster paddle page palace pan panther parade parcel park parrot parsley path patio
pattern peacock pear pearl pebble pelican pen pencil penguin pepper petal pheasant phone pickle picture pier
pigeon pillar pillow pine pipe pirate pistol pitch plain planet plank plate platform plaza plow plum pocket
poem poet poppy porch porcupine portrait potato potter powder prairie prayer priest prince prison puppet puppy
purse puzzle pyramid quail quarry quartz queen quill quilt rabbit raccoon radio raft rail rake ram ranch raven
reef ribbon rice riddle rider ridge rifle ring riot ripple rival robe robin rocket rod roof room root rope row
ruby rug ruin rumor rust saddle saint salad salmon salt sandal sandwich sapling sapphire satin sauce saucer
savanna saw scarf scholar scissor scooter scroll sculptor seagull season secret servant shadow shark shed
shelf shelter sheriff shield shirt shoe shop shovel shower shrimp shrine sickle sidewalk signal silk silver
singer sister skeleton skin skull slate sleeve slipper smoke snail snowfall soap sock sofa solstice song spade
sparrow spear sphere spice spiral spire spoon spruce squirrel stable stair stallion stamp statue steam steel
steeple stem stick stool storm stove straw stream street string sugar suitcase sun swallow swamp swan swing
sword syrup table tailor tambourine tangerine tapestry tavern taxi tent terrace theater thicket thistle thorn
thread throne thumb ticket tide tiger timber tinsel toad tobacco tomato tomb tongue tool torch tornado tower
toy tractor trail trap tray treasure tribe trophy trout truck trumpet trunk tundra tunnel turkey turnip
turquoise twig twin uncle urn valley valve van vase velvet vendor vessel vest villa village violet viper
visitor voice volcano volume voyage vulture wagon waist waiter walnut walrus waltz warden warrior wasp watch
water wax weasel weather weaver wedding weed weekend well whip whisper widow wildflower wilderness window wine
wing wire wizard wood wool workshop worm wound wren wrist yacht yard year yew zebra zephyr zinc
"""

VERBS = """
ache appear arrive ascend ask awaken balance bargain bathe beam beckon begin bend blaze bleed blink bloom
blossom blow blur blush boil bounce bow break breathe brood buckle burn burst buzz call chant charge chatter
cheer chime circle clang clap clatter climb cling coil collapse crackle crack crawl creak creep crouch crumble
cry curl dance dangle darken dart dawdle dazzle decay deepen depart descend dim disappear dissolve dive doze
drag dream drift drip droop drop drown dwell ebb echo emerge endure evaporate expand explode fade faint fall
falter fidget fizz flare flash flee flicker flinch float flood flow flutter fly fold follow forget freeze
frown gallop gather gaze giggle gleam glide glimmer glint glisten glitter glow grieve grow growl grumble hang
hatch heal hesitate hide hiss hold hope hover howl huddle hum hurry imagine inhale itch jingle jump kneel
knock labor laugh lean leap learn leave limp linger listen loosen lurk march matter meander melt mend mingle
moan mourn move mumble murmur mutter nod obey open orbit pace pause peel perish pine plead plunge ponder pour
pray preach prowl pulse purr quake quarrel quicken quiver race ramble rattle reach rebel recall recede reflect
rejoice relax remain remember repeat rest return ring ripen ripple rise roam roar roll rot rumble run rush
rustle sag sail scatter scream seep shake shatter shed shift shimmer shine shiver shout shrink shrug shudder
sigh simmer sing sink sizzle skate skip slumber slide slip slither slow smile smolder snap snarl sneeze snore
soar sob soften sparkle spin splash split spread sprout stagger stand stare stay steam stir stoop stop stray
stretch stroll struggle stumble surge surrender survive swarm sway sweep swell swerve swim swirl tangle tap
thaw thicken thrive throb tick tilt tingle tiptoe tire topple toss trace travel tremble trickle trot trudge
tumble turn twinkle twirl twist unfold unravel vanish vibrate wade wail wait wake walk wander wane watch waver
weep wheel whimper whirl whistle wilt wink wither wobble wonder work worry yawn yearn yield
"""

ADJECTIVES = """
able ancient angry anxious arctic ardent aware awkward azure bare bashful bent big bitter black bland blank
bleak blind blond blue blunt bold brave brief bright brisk brittle broad broken bronze brown busy calm careful
careless cheerful chilly civil clean clear clever cloudy clumsy coarse cold common cool costly cozy crimson
crisp crooked cruel curious curly damp dapper dark dear deep delicate dense dim distant dizzy double drab
drowsy dry dull dusky dusty eager early easy eerie elder elegant empty endless eternal even faint fair
faithful false famous far fearless feeble fertile festive fierce final firm fitful flat fleeting floral fond
foolish foreign forlorn formal fragile fragrant frail frantic free fresh friendly frosty frozen frugal full
funny fuzzy gaunt gentle giddy glad glassy gleeful gloomy glossy golden good graceful grand grateful grave
gray great greedy green grim gritty gruff hairy happy hard harsh hasty hazy healthy heavy hidden high hollow
holy homely honest hot huge humble hungry hushed icy idle immense impatient infinite innocent inner jagged
jaunty jealous jolly joyful keen kind lame large late lavish lazy lean limber liquid little lively lofty lone
lonely long lost loud lovely low loyal lucid lucky lunar lush mad magic majestic marble meek mellow merry
mighty mild misty modest moist mossy mournful muddy murky musty mute mystic naive naked narrow nasty neat new
nimble noble noisy northern numb obscure odd old opaque open pale passive patient peaceful perfect petty
placid plain playful polite poor precious pretty prickly proud prudent pure purple quaint quick quiet radiant
ragged random rapid rare raw ready red regal restless rich rigid ripe robust rocky rosy rough round royal rude
rugged rural rustic sacred sad safe salty sandy savage scarlet serene shabby shady shaggy shallow sharp shiny
short shrill shy silent silky simple sincere sleek sleepy slender slim slow sluggish small smoky smooth snowy
snug sober soft solemn solid somber sour southern spare sparse splendid spotless square stale stark steady
steep stern sticky stiff still stony stormy stout straight strange strict strong stubborn sturdy subtle sudden
sullen sunny supple sure sweet swift tall tame tan tardy tart tawny tender tense thick thin thirsty thorny
tidy timid tiny tired tough tranquil true twisted unique upright vacant vague vain valiant vast vibrant vivid
wakeful warm wary watchful weak weary wet white wicked wide wild willing windy wise wistful wooden woolen worn
yellow young zealous
"""

# Words that no training sample ever shows: they prove that a word is copied from the prompt, not known.
UNSEEN = """
abacus accordion albatross anvil aquarium asparagus astronaut avocado badger bandit beret blender bonnet
bronco burrito cabaret capsule caramel carousel catapult chameleon charcoal cinnamon clarinet cobbler cobra
coconut cologne coyote crayon cucumber dandelion denim dentist dynamo eggplant escalator eucalyptus ferret
fiasco flannel gadget gargoyle gazebo gecko gondola gorilla granola gravity grenade hamster harmonica hedgehog
helicopter hippo hologram hyena iguana jigsaw jockey kangaroo kayak kiosk kiwi koala lacquer laptop lasso
lemur magenta mandolin marmalade marzipan meatball microscope midget molasses mosaic mosquito muffin nebula
nutmeg oboe obelisk origami ostrich paprika parachute parasol pelvis periscope pinecone pistachio platypus
plumber polygon popcorn pretzel propeller quicksand radish ravioli reptile rhubarb saffron sardine satellite
saxophone scaffold scorpion sequoia shamrock skyscraper sombrero spaghetti spatula sphinx stapler submarine
sultan sunflower tadpole telegram thermos toboggan trampoline trombone tugboat tuxedo ukulele unicorn vampire
vanilla waffle walkway wigwam windshield wombat xylophone yodel yogurt zeppelin zipper
"""

OPPOSITES = """
hot cold big small up down left right day night open closed fast slow hard soft light dark full empty happy
sad high low early late rich poor young old wet dry loud quiet strong weak thick thin near far clean dirty
long short wide narrow sweet sour love hate win lose give take push pull begin end true false first last above
below inside outside before after always never black white deep shallow heavy weightless rough smooth sharp
blunt brave afraid cheap costly kind cruel north south east west buy sell float sink laugh cry wake sleep
remember forget arrive depart rise fall success failure war peace friend enemy question answer summer winter
king queen sunrise sunset summit base
"""

SYLLABLES = """
leaves:1 loaves:1 shelves:1 wolves:1 calves:1 knives:1 scarves:1 hooves:1 oases:3
ache:1 aching:2 being:2 idea:3 poem:2 poet:2 violet:3 violin:3 piano:3 lion:2 giant:2 riot:2 diary:3 quiet:2
science:2 pioneer:3 radio:3 patio:3 galaxy:3 area:3 oasis:3 naive:2 aware:2 eerie:2 infinite:3 ancient:2
anxious:2 curious:3 precious:2 radiant:3 valiant:2 patient:2 impatient:3 patience:2 silence:2 create:2 duel:2
fuel:2 cruel:2 jewel:2 towel:2 vowel:2 lyre:1 fjord:1 geyser:2 mosaic:3 museum:3 reindeer:2 theater:3
trellis:2 evergreen:3 safety:2 something:2 careful:2 careless:2 homely:2 lively:2 lovely:2 lonely:2
fireplace:2 wildflower:3 nightingale:3 horizon:3 lemonade:3 firefly:2 homeless:2 grapefruit:2 windowsill:3
treehouse:2 henhouse:2 lighthouse:2 household:2 bonfire:2 campfire:2 scarecrow:2 therefore:2 spotless:2
wakeful:2 graceful:2 peaceful:2 grateful:2 hateful:2 shameless:2 timeless:2 fire:1 hour:1 flower:2 shower:2
tower:2 sidewalk:2 notebook:2 suitcase:2 snowflake:2 engine:2 orchid:2 create:2 queue:1 rhythm:2 prism:2
chasm:2 iris:2 iron:2 ivory:3 icicle:3 vibrate:2 meander:3 recede:2 wilderness:3 camera:3 emperor:3 memory:3
chocolate:3 vegetable:3 evening:2 restaurant:3 hammer:2 reflection:3 photograph:3 loosen:2 smolder:2 tiptoe:2
toe:1 shoe:1 canoe:2 gazelle:2 giraffe:2 castaway:3 drawbridge:2 prairie:2 movie:2 zephyr:2 foreign:2
business:2 colonel:2 fierce:1 science:2 serene:2 sincere:2 axe:1 eyelash:2 eye:1 ear:1 fluke:1 marble:2
bridle:2 able:2 elbow:2 hearth:1 wreath:1 heather:2 leather:2 weather:2 feather:2 breathe:1 bathe:1 aeon:2
zealous:2 jealous:2 caterpillar:4 graveyard:2 cheese:1 fuse:1 goose:1 daydream:2 dial:2 trial:2 liar:2
diamond:3 violence:3 society:4 variety:4 lioness:3 obvious:3 various:3 glorious:3 serious:3 tedious:3
mysterious:4 harmonious:4 choir:1 wire:1 tire:1 squire:1 savanna:3 tapestry:3 raccoon:2 cocoon:2 lagoon:2
studio:3 traveler:3 wanderer:3 compiler:3 grandmother:3 baseball:2 airplane:2 solitude:3 bicycle:3 fisherman:3
volcano:3 lullaby:3 skeleton:3 delicate:3 quarrel:2 squirrel:2 evaporate:4 imagine:3 surrender:3 ukulele:4
juniper:3 area:3 wilt:1 rhyme:1 someone:2 meteor:3 cathedral:3 hurricane:3 tangerine:3 turquoise:2 iceberg:2
voyage:2 loyal:2 royal:2 neon:2 chariot:3 warrior:3
"""

IRREGULAR_PLURALS = """
leaf:leaves loaf:loaves shelf:shelves wolf:wolves calf:calves knife:knives child:children fisherman:fishermen
foot:feet goose:geese mouse:mice scarf:scarves tomato:tomatoes potato:potatoes echo:echoes oasis:oases
hoof:hooves
"""

WITHOUT_ADVERB = """
azure big blond blue bronze brown crimson early elder friendly golden gray green holy homely hushed icy little
lively lone lonely long lovely marble old purple scarlet shy small sour tall tan tawny tired twisted wooden
woolen worn yellow young silky able far fast even still
"""
WITHOUT_PLURAL = """
rain snow east west north south thunder lightning earth ivory tobacco mustard basil parsley laundry heat hay
wheat grass dew dust smoke steam mist fog frost ice coal cotton wool silk satin velvet leather linen gold
silver copper iron steel jade granite quartz amber butter honey milk broth bread cheese corn rice salt sugar
flour garlic ginger laughter silence patience sorrow childhood courage anger joy solitude peace love loss hope
time sleep music hush cunning daylight nightfall lemonade freight cargo wilderness clay chalk ink lumber
timber tinsel soil pollen nectar yarn lavender jasmine heather moss foam drizzle powder rosin soap wax gravel
dirt rust ash sand rhythm baseball code tea soup snowfall twilight midnight dusk dawn
"""

TAKES_ES = re.compile(r"([sxz]|ch|sh)$")
SIBILANT = re.compile(r"([sxz]|ch|sh|[cgsz]e)$")
CONSONANT_LE = re.compile(r"[^aeioul]le$")
DOUBLED = re.compile(r"[^aeiou][aeiou][bdgklmnprt]$")


def plural(noun: str) -> str:
    """The plural of a noun."""
    return _pairs(IRREGULAR_PLURALS).get(noun) or third_person(noun)


def third_person(verb: str) -> str:
    """The form with -s that follows he, she or it."""
    if TAKES_ES.search(verb):
        return verb + "es"
    return verb[:-1] + "ies" if re.search(r"[^aeiou]y$", verb) else verb + "s"


def gerund(verb: str) -> str:
    """The -ing form; final consonants double in one-syllable verbs and in a few stressed ones."""
    if verb.endswith("e") and not verb.endswith(("ee", "oe", "ye")):
        return verb[:-1] + "ing"
    if DOUBLED.search(verb) and (syllables(verb) == 1 or verb in {"begin", "forget", "rebel", "quarrel"}):
        return verb + verb[-1] + "ing"
    return verb + "ing"


def adverb(adjective: str) -> str:
    """The -ly form of an adjective."""
    if CONSONANT_LE.search(adjective):
        return adjective[:-1] + "y"
    if re.search(r"[^aeiou]y$", adjective):
        return adjective[:-1] + "ily"
    if adjective.endswith("ic"):
        return adjective + "ally"
    return adjective + ("y" if adjective.endswith("ll") else "ly")


def syllables(word: str) -> int:
    """Syllables of one lower-case word: from a table of exceptions, else its vowel groups."""
    listed = _pairs(SYLLABLES).get(word)
    return int(listed) if listed else _vowel_groups(word)


def _vowel_groups(word: str) -> int:
    count = len(re.findall(r"[aeiouy]+", word))
    silent_e = re.search(r"([^aeiouy]|[gq]u)e$", word) and not re.search(r"[^aeiouylrw]le$", word)
    return max(count - bool(silent_e), 1)


@cache
def _pairs(text: str) -> dict[str, str]:
    return dict(entry.split(":") for entry in text.split())


@cache
def topics() -> dict[str, tuple[str, ...]]:
    """Each topic with the nouns that go with it."""
    entries = (line.split(":") for line in TOPICS.strip().splitlines())
    return {topic: tuple(nouns.split()) for topic, nouns in entries}


@cache
def lexicon() -> dict[str, dict[str, int]]:
    """Part of speech -> word -> syllables, derived forms included."""
    nouns = sorted({*NOUNS.split(), *(noun for listed in topics().values() for noun in listed)})
    verbs, adjectives = sorted(set(VERBS.split())), sorted(set(ADJECTIVES.split()))
    no_adverb, no_plural = set(WITHOUT_ADVERB.split()), set(WITHOUT_PLURAL.split())

    irregular = _pairs(IRREGULAR_PLURALS)

    def inflected(base: str) -> int:
        return (
            syllables(irregular[base]) if base in irregular else syllables(base) + bool(SIBILANT.search(base))
        )

    return {
        "n": {noun: syllables(noun) for noun in nouns},
        "m": {plural(noun): inflected(noun) for noun in nouns if noun not in no_plural},
        "a": {adjective: syllables(adjective) for adjective in adjectives},
        "v": {third_person(verb): inflected(verb) for verb in verbs},
        "w": {verb: syllables(verb) for verb in verbs},
        "g": {gerund(verb): syllables(verb) + (not CONSONANT_LE.search(verb)) for verb in verbs},
        "d": {
            adverb(a): syllables(a) + (not CONSONANT_LE.search(a)) for a in adjectives if a not in no_adverb
        },
    }
